"""What the phases' `task.py` files share: the plan as one phase sees it, and the records of a product.

A `tasks` function fills the records of one phase, one for each CTA: a structured array (ctas,) of `plan.abi.TASK`. The
plan itself sets `kind` and `layer`. Words are offsets in the exchange, phases are numbers within a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onekernel.config import ModelConfig
from onekernel.weights.arena import Form, MatrixKind, MatrixPlace, WeightLayout, round_up

Ints = npt.NDArray[np.int64]
Records = npt.NDArray[Any]

ROWS_4, TERNARY, INT8 = 1, 2, 4
"""Bits of a task's flags: what its weight units are; see plan.abi.Flag."""
_FORMS: Mapping[Form, int] = {"bf16": 0, "ternary": TERNARY, "int8": INT8}


@dataclass(frozen=True, slots=True)
class Words:
    """The exchange word at which each buffer begins, for sequence 0."""

    x: int
    qkv: int
    partial: int
    mixed: int
    inner: int
    best: int
    token: int
    sums: int = 0
    counts: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """Which row tiles of a phase each CTA takes: arrays (ctas,)."""

    first: Ints
    count: Ints


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Which KV heads each CTA serves, arrays (ctas,): `count` heads from `first` on, `stride` apart, as `member`."""

    first: Ints
    count: Ints
    member: Ints
    members: int
    """CTAs that share a KV head."""
    stride: int


@dataclass(frozen=True, slots=True)
class Frame:
    """The plan as its phases see it."""

    config: ModelConfig
    layout: WeightLayout
    words: Words
    phases: int
    """Phases of a token."""

    @property
    def hidden_inputs(self) -> int:
        """Values of the residual to take, in fours."""
        return round_up(self.config.hidden_size, 4)


def unit_flags(place: MatrixPlace) -> int:
    """Return the flags that say what a matrix's units are."""
    return ROWS_4 if place.tile_rows == 4 else _FORMS[place.form]


def product(records: Records, frame: Frame, kind: MatrixKind, layer: int, share: Share) -> None:
    """Fill what every product has: the CTAs' tiles, their weights and the bias."""
    place = frame.layout.matrices[kind, layer]
    records["weights"] = place.offset_bytes + share.first * place.tile_bytes
    records["flags"] = unit_flags(place)
    records["first"] = share.first
    records["count"] = share.count
    records["k_units"] = place.k_units
    bias = frame.layout.constants.biases.get((kind, layer))
    records["bias"] = 0 if bias is None else bias + 1
