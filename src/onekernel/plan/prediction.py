"""How long a token will take by a plan: a memory that fills rings, consumers that empty them, and waits between phases.

A phase begins with a hand-over, in which memory goes on filling every CTA's ring until it is full. The consumers then
take what lies there as fast as they can, and after that as fast as memory brings it. So small phases cost their
hand-overs, large ones memory's time, and a larger ring hides more of the one behind the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from onekernel.plan.abi import Kind
from onekernel.plan.chunks import KEYS_AND_VALUES_BYTES, chunks, most_tokens
from onekernel.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What a GPU does under the megakernel; GB/s are 1e9 bytes per second."""

    read_gbps: float
    """What memory brings to all rings together."""
    take_gbps: float
    """What the consumers of all CTAs take from full rings."""
    hand_over_us: float
    """From the last value that a phase publishes to the first product of the next."""
    attention_us: float
    """Of an attention phase, its hand-over included, whatever the length."""
    attention_gbps: float
    """At which one member goes through its keys and values."""
    combine_us: float
    """Of a combine phase with partials of several members; it costs nothing if one member attends."""


H200 = Speeds(
    read_gbps=4359.0, take_gbps=10940.0, hand_over_us=1.57, attention_us=4.38, attention_gbps=36.0, combine_us=2.78
)
"""Fitted to the measured times of six dense models of 0.1 to 8 B parameters (results/decode.json): within 3 %."""


def predict_us(plan: Plan, position: int, speeds: Speeds) -> float:
    """Return the microseconds of a token in every sequence, with `position` tokens before it in each cache.

    All CTAs are taken to be alike: the proportions of phases are those of the most loaded CTA in each, and their sum is
    that of the one most loaded over a token, as rings level out what differs between phases.
    """
    hops = [_hop_us(plan, phase.kind, position + 1, speeds) for phase in plan.phases]
    per_cta = plan.bytes_per_phase
    most = per_cta.max(axis=0)
    reads = [float(read) for read in most * (per_cta.sum(axis=1).max() / most.sum())]
    fill, take = (gbps * 1e3 / plan.limits.ctas for gbps in (speeds.read_gbps, speeds.take_gbps))

    # Either memory is ahead and some ring is full in every token, or it lags and some ring is empty: whichever it is, a
    # token that begins so ends in the state in which all later ones begin.
    ahead = sum(reads) / fill < sum(hops) + sum(reads) / take
    stock = float(plan.shared.ring_bytes) if ahead else 0.0
    for _ in range(2):
        token_us = 0.0
        for hop, read in zip(hops, reads, strict=True):
            stock = min(plan.shared.ring_bytes, stock + fill * hop)
            took = max(read / take, (read - stock) / fill)
            stock = max(0.0, stock + fill * took - read)
            token_us += hop + took
    return token_us


def _hop_us(plan: Plan, kind: Kind, length: int, speeds: Speeds) -> float:
    """Return how long a phase keeps its consumers from taking weights, with `length` tokens to attend to."""
    if kind == Kind.EMBED:
        return 0.0
    block_pages = plan.block_pages_after(length)
    if kind == Kind.COMBINE:
        return speeds.combine_us if chunks(length, plan.members, block_pages) > 1 else 0.0
    if kind != Kind.ATTENTION:
        return speeds.hand_over_us
    heads = int(plan.tasks["count"][plan.tasks["kind"] == Kind.ATTENTION].max())
    tokens = most_tokens(length, plan.members, block_pages) * heads * plan.limits.sequences
    read = tokens * plan.config.head_dim * KEYS_AND_VALUES_BYTES
    return speeds.attention_us + read / (speeds.attention_gbps * 1e3)
