"""The records that Python writes and the megakernel reads, defined once; `kernels/abi.cuh` is generated from here.

`python -m onekernel.plan.abi` prints the header; a test fails if the file differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np


class Kind(IntEnum):
    """What a task does. A CTA with nothing to do in a phase has a task with count 0."""

    EMBED = 0
    QKV = 1
    ATTENTION = 2
    COMBINE = 3
    OUT = 4
    GATE_UP = 5
    DOWN = 6
    HEAD = 7
    CHOOSE = 8
    GATE = 9
    """Of a sparse feed-forward: the gate's product, then the rows of the CTA's neurons that fire."""
    GATHER = 10
    """The owners of hidden rows add up what the CTAs' neurons gave."""


class Flag(IntEnum):
    """Bits of a task's flags."""

    ROWS_4 = 1
    """Weight units are 4 rows x 128 columns instead of 8 x 64."""
    TERNARY = 2
    """Weight units are 512 bytes, 16 rows x 128 columns of two bits; inputs are made int8."""
    INT8 = 4
    """Weight units are 512 bytes, 16 rows x 32 columns of int8; inputs are made int8 twice, coarse and fine."""


@dataclass(frozen=True, slots=True)
class Field:
    """One member of a record."""

    name: str
    kind: Literal["u32", "u64", "f32", "f64"]
    comment: str


@dataclass(frozen=True, slots=True)
class Record:
    """A struct that host and device share: members in order, naturally aligned, no padding."""

    name: str
    comment: str
    fields: tuple[Field, ...]

    @property
    def dtype(self) -> np.dtype[np.void]:
        """Return the numpy dtype of one record."""
        kinds = {"u32": "<u4", "u64": "<u8", "f32": "<f4", "f64": "<f8"}
        return np.dtype([(field.name, kinds[field.kind]) for field in self.fields])

    @property
    def header(self) -> str:
        """Return the struct in CUDA C++. Members aligned naturally and without padding leave only its size open."""
        types = {"u32": "u32", "u64": "u64", "f32": "float", "f64": "double"}
        lines = [f"// {self.comment}", f"struct {self.name} {{"]
        lines += [f"  {types[field.kind]} {field.name};  // {field.comment}" for field in self.fields]
        lines += ["};", f"static_assert(sizeof({self.name}) == {self.dtype.itemsize});"]
        return "\n".join(lines)


TASK = Record(
    "Task",
    "What one CTA does in one phase.",
    (
        Field("weights", "u64", "byte offset of its first unit in the weight arena"),
        Field("kind", "u32", "Kind"),
        Field("flags", "u32", "Flag bits"),
        Field("first", "u32", "products: first row tile. embed: first hidden tile. attention, combine: first KV head"),
        Field(
            "count", "u32", "row tiles; attention, combine: KV heads, `stride` apart; choose: 1 on one CTA; 0: nothing"
        ),
        Field("k_units", "u32", "weight units along K"),
        Field("inputs", "u32", "values to take of each sequence, a multiple of 4"),
        Field("in_word", "u32", "exchange word of the first value"),
        Field("in_phase", "u32", "phase whose tag the words carry"),
        Field("out_word", "u32", "exchange word of row 0 of the whole phase"),
        Field("norm", "u32", "constants: norm weights of the inputs, plus 1; 0: no norm"),
        Field("bias", "u32", "constants: bias of row 0 of the whole matrix, plus 1; 0: none"),
        Field("layer", "u32", "layer, 0 where there is none"),
        Field("stride", "u32", "attention, combine: distance of its KV heads"),
        Field("member", "u32", "attention, combine: its place among the CTAs of its KV heads"),
    ),
)

HEADER = Record(
    "Header",
    "What is the same for all CTAs and all tokens.",
    (
        Field(
            "embedding", "u64", "byte offset in the weight arena: packed head if tied, else (vocab, hidden) bf16 rows"
        ),
        Field("phases", "u32", "phases of a token, P"),
        Field("ctas", "u32", "G"),
        Field("layers", "u32", "num_hidden_layers"),
        Field("hidden", "u32", "hidden_size"),
        Field("hidden_rows", "u32", "hidden_size padded to the tile of out and down"),
        Field("vocab_limit", "u32", "ids from here on are never chosen"),
        Field("kv_heads", "u32", "num_key_value_heads"),
        Field("num_pages", "u32", "pages of the KV cache in each layer"),
        Field("table_pages", "u32", "entries of a sequence's page table"),
        Field("block_pages", "u32", "pages in a row that one CTA owns"),
        Field("members", "u32", "CTAs that share a KV head"),
        Field("x_word", "u32", "exchange: X of sequence 0"),
        Field("x_words", "u32", "words of X for each sequence"),
        Field("qkv_word", "u32", "exchange: QKV"),
        Field("qkv_words", "u32", "words of QKV for each sequence"),
        Field("partial_word", "u32", "exchange: PARTIAL"),
        Field("partial_words", "u32", "words of PARTIAL for each sequence"),
        Field("mixed_word", "u32", "exchange: MIXED"),
        Field("mixed_words", "u32", "words of MIXED for each sequence"),
        Field("inner_word", "u32", "exchange: INNER"),
        Field("inner_words", "u32", "words of INNER for each sequence"),
        Field("best_word", "u32", "exchange: BEST, 2 words a CTA for each sequence"),
        Field("token_word", "u32", "exchange: TOKEN, 1 word for each sequence"),
        Field("rope", "u32", "constants: (context, head_dim / 2, 2) cosines and sines"),
        Field("q_norm", "u32", "constants: (layers, head_dim); read only with QK-norm"),
        Field("k_norm", "u32", "constants: (layers, head_dim)"),
        Field("embed_packed", "u32", "1: the embedding is the packed head, whose tasks' flags say how"),
        Field("embed_units", "u32", "packed embedding: weight units along K"),
        Field("embed_rows_4", "u32", "packed embedding: 1 if its units are 4 x 128"),
        Field("eps", "f32", "rms_norm_eps"),
        Field("max_inputs", "u32", "widest phase: values in shared memory for each sequence, in whole units"),
        Field("max_rows", "u32", "most rows of one CTA in one phase but the head: partial sums in shared memory"),
        Field("head_dim", "u32", "head_dim, which is compiled in too"),
        Field("max_hidden_rows", "u32", "most hidden rows of one CTA: the residual in shared memory"),
        Field("x_at", "u32", "shared memory, bytes behind the first task: inputs"),
        Field("partial_at", "u32", "the same: sums over parts of K, and scratch"),
        Field("residual_at", "u32", "the same: the residual"),
        Field("rest_at", "u32", "the same: what only quantised or sparse models keep"),
        Field("inner", "u32", "intermediate_size"),
        Field("qkv_scales", "u32", "constants, quantised weights only: scales of row 0 of qkv in layer 0"),
        Field("out_scales", "u32", "constants: the same of out"),
        Field("gate_up_scales", "u32", "constants: the same of gate_up"),
        Field("down_scales", "u32", "constants: the same of down"),
        Field("layer_scales", "u32", "floats from a layer's scales to those of the next, or of a head of int8"),
        Field("neuron_tiles", "u32", "row tiles of a sparse feed-forward's gate, behind which its neurons lie"),
        Field("counts_word", "u32", "exchange: COUNTS, neurons that fired in each layer since the launch began"),
    ),
)

SAMPLING = Record(
    "Sampling",
    "How the tokens of one sequence are chosen, for one launch.",
    (
        Field("seed", "u64", "key of the noise"),
        Field("top_p", "f64", "read with TOP_P"),
        Field("flags", "u32", "ChooseFlag bits"),
        Field("top_k", "u32", "0: all"),
        Field("logprobs", "u32", "0: none; else 1 + how many of the likeliest tokens are reported"),
        Field("temperature", "f32", "0: greedy"),
        Field("least", "f32", "logarithm of min_p; -inf: all"),
        Field("repetition", "f32", "1: none"),
        Field("presence", "f32", "subtracted once"),
        Field("frequency", "f32", "subtracted for each occurrence"),
    ),
)

RECORDS = (TASK, HEADER, SAMPLING)


class ChooseMode(IntEnum):
    """What a launch needs to choose tokens, the most of its sequences."""

    GREEDY = 0
    """The largest logit."""
    SCORED = 1
    """The best score: bias, mask, penalties, temperature and noise; one hand-over, as greedy."""
    ROUNDS = 2
    """Filters or log probabilities: all CTAs take part in the choice."""


class ChooseFlag(IntEnum):
    """Bits of a sampling's flags: what is on."""

    MASKED = 1
    BIASED = 2
    PENALISED = 4
    TOP_P = 8
    FILTERED = 16
    """Not greedy, and top-k, top-p or min-p."""


class Failure(IntEnum):
    """Why no token was chosen: the low bits of a token word with TOKEN_FAILED."""

    LOGITS = 0
    """A logit was not finite."""
    SCORES = 1
    """Penalties and temperature made a score that is not finite."""
    EMPTY = 2
    """Mask and bias leave no token."""


TOKEN_STOP = 1 << 31
"""Bit of a token word: this is the last token of the launch."""
TOKEN_FAILED = 1 << 30
"""Bit of a token word: there is no token, but a Failure."""
NO_PHASE = 0xFFFFFFFF
MAX_LAUNCH_TOKENS = 4096

PROMPT_TOKEN = 1 << 31
"""Bit of a token's count: it is in the prompt."""
RADIX = 256
"""Bins of the choice's tallies."""
LISTED = 20
"""Tokens that a CTA lists; as many as log probabilities can be asked for (config.MAX_TOP_LOGPROBS)."""
CHOICE_ROUNDS = 64
"""Rounds of a token's choice at most: tags are token * CHOICE_ROUNDS + round + 1."""
CHOICE_FIXED_WORDS = 2 * RADIX + 16
CHOICE_CTA_WORDS = 8 + 2 * LISTED + 6
CHOICE_SHARED_BYTES = 48 * RADIX + 1920
"""Shared memory of the choice, where products keep their inputs and partial sums."""
REPORT_WORDS = 1 + 2 * LISTED
"""Words that tell the host of a token's log probabilities."""

CONSTANTS = (
    "TOKEN_STOP",
    "TOKEN_FAILED",
    "NO_PHASE",
    "PROMPT_TOKEN",
    "RADIX",
    "LISTED",
    "CHOICE_ROUNDS",
    "CHOICE_FIXED_WORDS",
    "CHOICE_CTA_WORDS",
    "CHOICE_SHARED_BYTES",
    "REPORT_WORDS",
)


def header_text() -> str:
    """Return the whole of kernels/abi.cuh."""
    kinds = "\n".join(f"  {kind.name} = {kind.value}," for kind in Kind)
    groups = (("FLAG", Flag), ("CHOOSE", ChooseMode), ("CHOOSE", ChooseFlag), ("FAILED", Failure))
    named = {f"{prefix}_{member.name}": member.value for prefix, group in groups for member in group}
    named |= {name: globals()[name] for name in CONSTANTS}
    constants = "\n".join(f"constexpr u32 {name} = {value}u;" for name, value in named.items())
    records = "\n\n".join(record.header for record in RECORDS)
    return f"""// Generated by `python -m onekernel.plan.abi`; do not edit. What Python writes and the megakernel reads.
#pragma once

#include "ptx/platform.cuh"

enum class Kind : u32 {{
{kinds}
}};

{constants}

{records}
"""


if __name__ == "__main__":
    import sys

    sys.stdout.write(header_text())
