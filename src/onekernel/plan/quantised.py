"""Products of quantised weights in an interpreted launch, by the rounding contract of phases/ternary.py, in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from onekernel.plan.abi import Flag, Kind
from onekernel.plan.exchange import F32
from onekernel.plan.layout import SMALL_UNIT_BYTES
from onekernel.plan.machine import Machine
from onekernel.weights.arena import QUANTISED_ROWS
from onekernel.weights.ternary.activations import SMALLEST_ABSMAX, SMALLEST_BEFORE_NORM, root_mean_square
from onekernel.weights.ternary.int8_rows import unpack_rows
from onekernel.weights.ternary.packed import UNIT_COLUMNS
from onekernel.weights.ternary.tensor_core import TensorCoreTiles

_INT8_COLUMNS = 32
_LEAST, _LEAST_BEFORE_NORM = np.float32(SMALLEST_ABSMAX), np.float32(SMALLEST_BEFORE_NORM)
_FINE = np.float32(254)

F64 = npt.NDArray[np.float64]
"""Whole numbers: products and sums of them are exact, and faster than of integers."""


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """The rows of one task: weights, and scales (rows, groups), one for each run of `group` columns."""

    weights: F64
    scales: F32
    fine: bool
    """Whether the inputs are two int8 values each."""

    @classmethod
    def of(cls, machine: Machine, task: dict[str, int]) -> QuantisedRows:
        """Read what a task multiplies with; raises PlanError outside the arenas."""
        tiles, units, int8 = task["count"], task["k_units"], bool(task["flags"] & Flag.INT8)
        packed = torch.from_numpy(machine.bytes(task["weights"], tiles * units * SMALL_UNIT_BYTES).copy())
        rows = tiles * QUANTISED_ROWS
        ternary = machine.plan.config.ternary
        group = None if ternary is None or int8 else ternary.group
        of_row = 1 if group is None else units * UNIT_COLUMNS // group
        if int8:
            weights = unpack_rows(packed, rows, units * _INT8_COLUMNS)
        else:
            whole = TensorCoreTiles(
                packed.view(tiles, -1), torch.zeros(rows), (rows, units * UNIT_COLUMNS), (rows,), None
            )
            weights = whole.unpack_codes()
        header = machine.header
        layer = header["layers"] if int8 else task["layer"]
        name = "qkv" if int8 else Kind(task["kind"]).name.lower()
        start = header[f"{name}_scales"] + layer * header["layer_scales"] + task["first"] * QUANTISED_ROWS * of_row
        scales = machine.floats(start, rows * of_row).reshape(tiles, of_row, QUANTISED_ROWS)
        return cls(weights.numpy().astype(np.float64), scales.transpose(0, 2, 1).reshape(rows, of_row), int8)

    def times(self, t: F32, root: np.float32 | None) -> F32:
        """Return the product with the inputs, which are made int8 first; `root`: what their norm divides them by."""
        most = np.maximum(np.abs(t).max(), _LEAST if root is None else _LEAST_BEFORE_NORM)
        inverse = np.float32(1) / most * np.float32(127)
        padded = np.zeros(self.weights.shape[1], np.float32)
        padded[: len(t)] = t * inverse
        if root is not None:
            inverse = inverse * root
        coarse = _int8(padded)
        if self.fine:
            rest = _int8((padded - coarse.astype(np.float32)) * _FINE)
            sums = (self.weights @ coarse).astype(np.float32) + (self.weights @ rest).astype(np.float32) / _FINE
            return _floats(sums * (self.scales[:, 0] / inverse))
        if self.scales.shape[1] == 1:
            return _floats((self.weights @ coarse).astype(np.float32) * (self.scales[:, 0] / inverse))
        total = np.zeros(len(self.weights), np.float32)
        parts = zip(
            np.split(self.weights, self.scales.shape[1], axis=1), np.split(coarse, self.scales.shape[1]), strict=True
        )
        for (weights, values), scales in zip(parts, self.scales.T, strict=True):
            total = total + (weights @ values).astype(np.float32) * scales
        return _floats(total / inverse)


def normed(machine: Machine, task: dict[str, int], x: F32) -> tuple[F32, np.float32 | None]:
    """Return a task's inputs times the weights of its norm, if it has one, and what the norm divides them by."""
    if not task["norm"]:
        return x, None
    header = machine.header
    count = {Kind.OUT: task["inputs"], Kind.DOWN: header["inner"]}.get(Kind(task["kind"]), header["hidden"])
    root = root_mean_square(torch.from_numpy(x[None, :count].copy()), header["eps"])
    weighted: F32 = x * machine.floats(task["norm"] - 1, len(x))
    return weighted, np.float32(root.item())


def _int8(values: F32) -> F64:
    """Round half to even; NaN, which the scale says as well, becomes 0."""
    whole: F64 = np.clip(np.nan_to_num(np.rint(values), nan=0.0), -128, 127).astype(np.float64)
    return whole


def _floats(values: npt.NDArray[np.floating[Any]]) -> F32:
    return values.astype(np.float32, copy=False)
