"""Which exchange words every task takes and publishes: the kernel's behaviour as ranges, from the records alone.

The validator proves its theorems about these ranges, and a test holds them against what the interpreter touches.
Ranges are those of sequence 0; the others have the same at a distance, and share no word with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onekernel.config import PAGE_TOKENS
from onekernel.phases.frame import Ints
from onekernel.plan.abi import Kind
from onekernel.plan.chunks import blocks, chunks, owner, slices
from onekernel.plan.plan import Plan, tile_rows


@dataclass(frozen=True, slots=True)
class Split:
    """How the cache is shared out at some length: among members 0 to chunks - 1; `owner` appends the new token."""

    chunks: int
    owner: int


@dataclass(frozen=True, slots=True)
class Step:
    """What all CTAs do at once between taking and publishing: a phase, or of attention one KV head of each CTA.

    An empty range, start = stop, is none.
    """

    phase: int
    active: npt.NDArray[np.bool_]
    """(ctas,): who takes part."""
    takes: Ints
    """(ctas, ranges, 2): start and stop."""
    in_phase: Ints
    """(ctas,): the phase whose tag the words must carry."""
    gives: Ints
    """(ctas, ranges, 2)."""
    out_phase: int
    """The phase whose tag they get."""


def splits(plan: Plan) -> tuple[Split, ...]:
    """Return every way in which the cache can be split at a length up to the context."""
    members, block_pages = int(plan.header["members"]), int(plan.header["block_pages"])
    found = {
        Split(chunks(block * PAGE_TOKENS * block_pages + 1, members, block_pages), owner(block, members))
        for block in range(blocks(plan.limits.max_context, block_pages))
    }
    return tuple(sorted(found, key=lambda split: (split.chunks, split.owner)))


def steps(plan: Plan, phase: int, split: Split) -> Iterator[Step]:
    """Yield the steps of one phase of a token whose length, the token included, splits the cache so."""
    tasks, kind = plan.tasks[:, phase], plan.phases[phase].kind
    active, in_phase = tasks["count"] > 0, tasks["in_phase"].astype(np.int64)
    if kind == Kind.ATTENTION:
        yield from _attention(plan, phase, split)
    elif kind == Kind.COMBINE:
        yield from _combine(plan, phase, split)
    else:
        everyone = np.ones_like(active)
        takes, gives = _token_ranges(plan, phase) if kind in (Kind.EMBED, Kind.CHOOSE) else _product_ranges(plan, phase)
        # All CTAs learn the token, and all have a word in the choice, with rows of the vocabulary or without.
        yield Step(phase, everyone if kind in (Kind.EMBED, Kind.HEAD) else active, takes, in_phase, gives, phase)


def _ranges(start: Ints, length: Ints) -> Ints:
    """Return (ctas, 1, 2)."""
    return np.stack((start, start + length), axis=-1)[:, None]


def _product_ranges(plan: Plan, phase: int) -> tuple[Ints, Ints]:
    tasks, kind = plan.tasks[:, phase], plan.phases[phase].kind
    count, in_word, inputs = (tasks[name].astype(np.int64) for name in ("count", "in_word", "inputs"))
    takes = _ranges(in_word, np.where(count > 0, inputs // 2, 0))
    if kind == Kind.HEAD:
        return takes, _ranges(tasks["out_word"] + 2 * np.arange(len(tasks)), np.full_like(count, 2))
    if kind == Kind.GATE:
        rows = int(plan.header["hidden_rows"])
        start = tasks["out_word"] + np.arange(len(tasks)) * rows
        return takes, _ranges(start, np.where(count > 0, rows, 0))
    if kind == Kind.GATHER:
        takes = _gathered(plan, phase)
    return takes, _rows_given(plan, phase)


def _gathered(plan: Plan, phase: int) -> Ints:
    """Return (ctas, ctas, 2): a float32 a word, for each of a CTA's hidden rows from every CTA."""
    tasks = plan.tasks[:, phase]
    rows = tile_rows(tasks["flags"])
    first, count = tasks["first"].astype(np.int64) * rows, tasks["count"].astype(np.int64) * rows
    start = (tasks["in_word"] + first)[:, None] + np.arange(len(tasks)) * int(plan.header["hidden_rows"])
    return np.stack((start, start + count[:, None]), axis=-1)


def _rows_given(plan: Plan, phase: int) -> Ints:
    tasks, kind = plan.tasks[:, phase], plan.phases[phase].kind
    words = tile_rows(tasks["flags"]) // (4 if kind == Kind.GATE_UP else 2)
    first, count = tasks["first"].astype(np.int64) * words, tasks["count"].astype(np.int64) * words
    return _ranges(tasks["out_word"] + first, count)


def _token_ranges(plan: Plan, phase: int) -> tuple[Ints, Ints]:
    tasks, one = plan.tasks[:, phase], np.ones(plan.limits.ctas, np.int64)
    if plan.phases[phase].kind == Kind.EMBED:
        return _ranges(tasks["in_word"].astype(np.int64), one), _rows_given(plan, phase)
    best = _ranges(tasks["in_word"].astype(np.int64), 2 * int(plan.header["ctas"]) * one)
    return best, _ranges(tasks["out_word"].astype(np.int64), one)


def _heads(plan: Plan, phase: int) -> Iterator[tuple[npt.NDArray[np.bool_], Ints]]:
    """Yield (active, KV head) of each round: a CTA serves its heads one after another."""
    tasks = plan.tasks[:, phase]
    for turn in range(int(tasks["count"].max(initial=0))):
        yield tasks["count"] > turn, tasks["first"].astype(np.int64) + turn * tasks["stride"].astype(np.int64)


def _attention(plan: Plan, phase: int, split: Split) -> Iterator[Step]:
    tasks, config, header = plan.tasks[:, phase], plan.config, plan.header
    half, group = config.head_dim // 2, config.num_attention_heads // config.num_key_value_heads
    member, in_phase = tasks["member"].astype(np.int64), tasks["in_phase"].astype(np.int64)
    for active, head in _heads(plan, phase):
        base = tasks["in_word"].astype(np.int64)
        owns = np.where(member == split.owner, half, 0)
        takes = np.concatenate(
            (
                _ranges(base + head * group * half, np.full_like(base, group * half)),
                _ranges(base + config.q_size // 2 + head * half, owns),
                _ranges(base + (config.q_size + config.kv_size) // 2 + head * half, owns),
            ),
            axis=1,
        )
        if split.chunks == 1:
            given = _ranges(int(header["mixed_word"]) + head * group * half, np.full_like(base, group * half))
        else:
            given = _partials(plan, tasks["out_word"].astype(np.int64), head, member)
        yield Step(phase, active & (member < split.chunks), takes, in_phase, given, phase + (split.chunks == 1))


def _combine(plan: Plan, phase: int, split: Split) -> Iterator[Step]:
    if split.chunks == 1:
        return
    tasks, config, members = plan.tasks[:, phase], plan.config, int(plan.header["members"])
    half, group, record = config.head_dim // 2, config.q_size // config.kv_size, config.head_dim + 2
    bounds, member = np.array(slices(group * half, members)), tasks["member"].astype(np.int64)
    start, stop = bounds[member], bounds[np.minimum(member + 1, members)]
    for active, head in _heads(plan, phase):
        takes = []
        for h in range(group):
            low, high = (np.clip(bound - h * half, 0, half) for bound in (start, stop))
            both = np.where(high > low, 2, 0)
            for part in range(split.chunks):
                word = tasks["in_word"] + ((head * group + h) * members + part) * record
                takes += [_ranges(word + 2 * low, 2 * (high - low)), _ranges(word + config.head_dim, both)]
        given = _ranges(tasks["out_word"] + head * group * half + start, stop - start)
        in_phase = tasks["in_phase"].astype(np.int64)
        yield Step(phase, active & (stop > start), np.concatenate(takes, axis=1), in_phase, given, phase)


def _partials(plan: Plan, base: Ints, head: Ints, member: Ints) -> Ints:
    """Return (ctas, group, 2): a member's partials, for each query head of a KV head."""
    config = plan.config
    group, record = config.num_attention_heads // config.num_key_value_heads, config.head_dim + 2
    query_heads = head[:, None] * group + np.arange(group)
    start = base[:, None] + (query_heads * int(plan.header["members"]) + member[:, None]) * record
    return np.stack((start, start + record), axis=-1)
