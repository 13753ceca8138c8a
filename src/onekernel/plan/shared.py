"""The shared memory of a CTA: what the kernel keeps there, in which order, and how many ring stages are left over."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from onekernel.errors import ConfigError
from onekernel.plan.abi import CHOICE_SHARED_BYTES, TASK
from onekernel.plan.limits import Limits
from onekernel.weights.arena import round_up

MIN_STAGES = 4
"""Two on their way, one being read, one spare; with fewer the memory waits for the consumers."""

_TRACE_WORDS = 8
"""Where the two streams of a traced kernel stand."""
_BARRIER_BYTES = 16
_SPLIT_BYTES = 2 * 16
"""Of each sequence: how its cache is shared out for the token that is computed, and for the one that is loaded."""
_FOURS_IN_REGISTERS = 4
"""Fours of values that a thread of a quantised product keeps in registers until they are int8."""
_QUAD = 4
_SPLIT_VALUES = 64
_FEWEST_PIECE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """Parts in their order, each a multiple of 16 bytes; offsets in bytes from the start."""

    stages: int
    ring_bytes: int
    rope: int
    """(sequences, head_dim / 2, 2) float32: the token's cosines and sines."""
    heads: int
    """(2 * group + 2, head_dim) bf16: attention's queries, new key, new value, what was rounded off the queries."""
    sums: int
    """(sequences, consumer_warps) float32."""
    words: int
    """Words between threads: leave, appended, stopped, tokens, then each warp's best logit and its token."""
    splits: int
    """(2, sequences, 4): how the cache is shared out among the members of a KV head."""
    tasks: int
    """The CTA's task records."""
    x: int
    """(sequences, max_inputs) bf16: a phase's inputs. Attention and the choice keep their scratch here and in
    `partial`."""
    partial: int
    """(consumer_warps, sequences, max_rows) float32: sums over parts of K."""
    residual: int
    """(sequences, max_hidden_rows) float32."""
    quantised: int
    """Of products with int8 activations only: each warp's largest value and sum of int8 values, what scales are divided
    by, sums of squares of four inputs, sums of 64 or 128 int8 values, inputs that no register has room for (float32),
    with groups the scales of the CTA's rows."""
    neurons: int
    """Of a sparse feed-forward: the gates of the CTA's neurons, float32 (max_neurons), then a word and a float32 for
    each of those that fire."""
    total_bytes: int
    max_rows: int
    """Rows whose partial sums fit; a phase with more takes them in runs."""


@dataclass(frozen=True, slots=True)
class QuantisedSizes:
    """What products with int8 activations need beside the rest."""

    sums: int
    """Words for integer sums over parts of K, of the widest phase."""
    scales: int
    """With groups: floats of the scales of one CTA's rows in one phase."""


def quantised_run(k_units: int, warps: int) -> int:
    """Return the fewest row tiles of a quantised matrix that end with a ring stage."""
    stage_units = 2 * warps
    return stage_units // math.gcd(stage_units, k_units)


def attention_floats(warps: int, group: int, head_dim: int, stage_bytes: int) -> int:
    """Return the floats of attention's scratch; that of `records` in phases/attention/kernel.cuh.

    Warps are split over quads of query heads, and over every 64 values of a head; each leaves a record of its tokens.
    Raises ConfigError if there are too few warps, or if keys and values of 8 tokens do not fit a stage.
    """
    piece_bytes = _FEWEST_PIECE_TOKENS * head_dim * 4
    if piece_bytes > stage_bytes:
        raise ConfigError(
            f"keys and values of {_FEWEST_PIECE_TOKENS} tokens of {head_dim} values take {piece_bytes} bytes, more "
            f"than a ring stage of {stage_bytes}: use {-(-piece_bytes // 1024)} consumer warps or more"
        )
    splits = -(-group // _QUAD) * -(-head_dim // _SPLIT_VALUES)
    if splits > warps:
        raise ConfigError(
            f"{group} query heads of {head_dim} values a KV head take {splits} consumer warps or more, not {warps}"
        )
    return warps // splits * group * (head_dim + 2)


def _token_words(sequences: int) -> int:
    return round_up(3 + sequences, 4) + _TRACE_WORDS


def shared_layout(
    limits: Limits,
    *,
    phases: int,
    max_inputs: int,
    most_rows: int,
    max_hidden_rows: int,
    group: int,
    head_dim: int,
    quantised: QuantisedSizes | None = None,
    max_neurons: int = 0,
) -> SharedLayout:
    """Lay out a CTA's shared memory; whatever is left over becomes ring, of an even number of stages.

    Halves of the warps take stages in turns (kernels/tile/product.cuh), and a stage must stay with its half.

    `most_rows` is what the widest phase but the head would like to sum at once; it gets as little as one stage's rows
    if the ring would otherwise have fewer than 4 stages. `max_neurons`: most neurons of one CTA; 0: the feed-forward is
    dense. Raises ConfigError if even that does not fit.
    """
    scratch = attention_floats(limits.consumer_warps, group, head_dim, limits.stage_bytes)
    fewest_rows = max(8 * limits.consumer_warps, round_up(max_hidden_rows, 8) if max_neurons else 0)
    quantised_bytes = 0
    if quantised is not None:
        fewest_rows = max(fewest_rows, round_up(-(-quantised.sums // limits.consumer_warps), 8))
        round_fours = _FOURS_IN_REGISTERS * 32 * (limits.consumer_warps - 1)
        floats = (
            2 * round_up(limits.consumer_warps, 4)
            + 4
            + max_inputs // 4
            + round_up(max_inputs // 64, 4)
            + (max_inputs // 4 - 1) // round_fours * round_fours * 4
            + round_up(quantised.scales, 4)
        )
        most_rows, quantised_bytes = fewest_rows, 4 * floats
    for max_rows in (max(round_up(most_rows, 8), fewest_rows), fewest_rows):
        records = scratch - limits.sequences * max_inputs // 2  # of attention, that do not fit where inputs are
        choice = CHOICE_SHARED_BYTES // 4 - limits.sequences * max_inputs // 2
        parts = max(round_up(limits.consumer_warps, 4) * limits.sequences * max_rows, records, choice)
        sizes = (
            round_up(limits.sequences * head_dim, 4) * 4,
            round_up((group + 1) * head_dim, 4) * 4,
            round_up(limits.sequences * limits.consumer_warps, 4) * 4,
            round_up(_token_words(limits.sequences) + 2 * limits.sequences * limits.consumer_warps, 4) * 4,
            _SPLIT_BYTES * limits.sequences,
            phases * TASK.dtype.itemsize,
            limits.sequences * max_inputs * 2,
            round_up(parts, 4) * 4,
            limits.sequences * max_hidden_rows * 4,
            quantised_bytes,
            round_up(12 * max_neurons, 16),
        )
        stages = (limits.shared_bytes - sum(sizes)) // (limits.stage_bytes + _BARRIER_BYTES) // 2 * 2
        if stages >= MIN_STAGES:
            break
    else:
        raise ConfigError(
            f"shared memory of {limits.shared_bytes} bytes leaves {max(stages, 0)} ring stages of {limits.stage_bytes} "
            f"bytes beside {sum(sizes)} bytes for {limits.sequences} sequences of {max_inputs} inputs; at least "
            f"{MIN_STAGES} are needed: use fewer sequences, fewer consumer warps (now {limits.consumer_warps}) or a "
            "smaller model"
        )
    ring = stages * (limits.stage_bytes + _BARRIER_BYTES)
    rope, heads, sums, words, splits, tasks, x, partial, residual, after, neurons, total = itertools.accumulate(
        sizes, initial=ring
    )
    return SharedLayout(
        stages, ring, rope, heads, sums, words, splits, tasks, x, partial, residual, after, neurons, total, max_rows
    )
