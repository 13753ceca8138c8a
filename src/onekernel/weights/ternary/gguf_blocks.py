"""Ternary block types of GGUF files as codes and scales, without losing a bit.

Sources: ggml's quants (TQ1_0, TQ2_0, Q2_0) and microsoft/BitNet's fork (I2_S).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from onekernel.errors import ModelError
from onekernel.weights.ternary.matrix import TernaryMatrix
from onekernel.weights.ternary.scales import check_scales

Bytes = npt.NDArray[np.uint8]
Parts = tuple[npt.NDArray[Any], npt.NDArray[np.float32]]
"""Codes 0 to 2 by blocks, and the scales of the blocks or of the tensor."""

_POWERS = (1, 3, 9, 27, 81)
_SMALLEST_GROUP, _LARGEST_GROUP = 64, 128


def decode(kind: str, data: Bytes, shape: tuple[int, int], name: str) -> TernaryMatrix:
    """Return the matrix in a tensor's bytes; raises ModelError naming the tensor for a code that is not ternary.

    `kind` is one of `KINDS`. Types with a scale for each block give one scale for the whole matrix if all blocks agree,
    as those of models with one scale do, else a scale for each group of 64 or 128 columns.
    """
    stored, scales = KINDS[kind](data, shape)
    if int(stored.max()) > 2:
        raise ModelError(f"{name} of type {kind} has codes of 3, where ternary ones are 0, 1 and 2: it is not ternary")
    codes = torch.from_numpy(stored.view(np.int8) - np.int8(1)).view(shape)
    has_values = (stored != 1).reshape(scales.size, -1).any(axis=1)
    check_scales(torch.from_numpy(scales[has_values | (scales != 0)]), name)  # zeros may have a scale of 0
    if scales.size == 1:
        return TernaryMatrix(codes, torch.from_numpy(scales.reshape(1)))
    used = scales[has_values]
    if used.size == 0 or (used == used[0]).all():
        return TernaryMatrix(codes, torch.tensor([float(used[0]) if used.size else 0.0]))
    block = shape[1] // (scales.size // shape[0])
    group = _SMALLEST_GROUP if block == _SMALLEST_GROUP else _LARGEST_GROUP
    by_group = torch.from_numpy(scales).view(shape[0], -1).repeat_interleave(block // group, dim=1)
    return TernaryMatrix(codes, by_group, group=group)


def _i2_s(data: Bytes, shape: tuple[int, int]) -> Parts:
    """Windows of 128 codes in 32 bytes, the first 32 in the highest bit pairs; behind them all one float32 scale."""
    end = shape[0] * shape[1] // 4
    windows = data[:end].reshape(-1, 1, 32)
    shifts = np.array([6, 4, 2, 0], dtype=np.uint8).reshape(1, 4, 1)
    return (windows >> shifts & 3).reshape(-1, 128), data[end : end + 4].copy().view("<f4").astype(np.float32)


def _tq1_0(data: Bytes, shape: tuple[int, int]) -> Parts:
    """Blocks of 256: five codes a byte in base 3 as a fraction of 256, in runs of 32, 16 and 4 bytes; then float16."""
    blocks = data.reshape(-1, 54)
    parts = [_digits(blocks[:, :32], 5), _digits(blocks[:, 32:48], 5), _digits(blocks[:, 48:52], 4)]
    return np.concatenate(parts, axis=1), _half(blocks[:, 52:54])


def _digits(packed: Bytes, count: int) -> npt.NDArray[Any]:
    powers = np.array(_POWERS[:count], dtype=np.uint8).reshape(1, count, 1)
    shifted = packed[:, None, :] * powers  # uint8: what overflows are the digits before
    return (shifted.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(packed), -1)


def _tq2_0(data: Bytes, shape: tuple[int, int]) -> Parts:
    """Blocks of 256: two runs of 32 bytes with 128 codes each, the first 32 in the lowest bit pairs; then float16."""
    blocks = data.reshape(-1, 66)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    codes = blocks[:, :64].reshape(-1, 2, 1, 32) >> shifts & 3
    return codes.reshape(-1, 256), _half(blocks[:, 64:66])


def _q2_0(group: int) -> Callable[[Bytes, tuple[int, int]], Parts]:
    """Blocks of `group`: a float16, then four consecutive codes a byte from the lowest bit pair up."""

    def read(data: Bytes, shape: tuple[int, int]) -> Parts:
        blocks = data.reshape(-1, 2 + group // 4)
        shifts = np.array([0, 2, 4, 6], dtype=np.uint8)
        return (blocks[:, 2:, None] >> shifts & 3).reshape(-1, group), _half(blocks[:, :2])

    return read


def _half(stored: Bytes) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(stored).view("<f2").astype(np.float32).reshape(-1)


KINDS: dict[str, Callable[[Bytes, tuple[int, int]], Parts]] = {
    "I2_S": _i2_s,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "Q2_0": _q2_0(64),
    "Q2_0_128": _q2_0(128),
}
"""Block type -> what takes its bytes apart."""
