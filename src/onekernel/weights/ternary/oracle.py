"""Weights of a stored ternary tensor by the words of its format alone: the check on the readers that models load with.

Nothing here shares code with the readers: elements are looked up one formula at a time, in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Rows = npt.NDArray[np.float64]

AMBIGUOUS = 1e-4
"""Masters this near to half a scale may round either way in float32."""

SMALLEST = 1e-5
"""Lower bound of a scale of masters."""


def hf_packed_rows(packed: torch.Tensor, rows: Sequence[int], count: int) -> Rows:
    """Return codes of Hugging Face's packing of `count` rows: row n is in byte row n mod ceil(N / 4)."""
    height = -(-count // 4)
    return np.stack([packed[n % height].cpu().numpy().astype(np.int64) // 4 ** (n // height) % 4 - 1.0 for n in rows])


def master_rows(weight: torch.Tensor, rows: Sequence[int], group: int | None) -> Rows:
    """Return rows of a master weight after absmean; NaN where float32 and float64 may round differently."""
    picked = weight[list(rows)].cpu().to(torch.float64).numpy()
    if group is not None:
        return np.concatenate([_by_absmean(part) for part in np.split(picked, picked.shape[1] // group, 1)], 1)
    sizes = weight.abs()
    largest, total = sizes.max(), float(sizes.sum(dtype=torch.float64))
    is_ternary = bool(((sizes == 0) | (sizes == largest)).all())
    return _absmean(picked, np.array(max(total / sizes.numel(), SMALLEST)), np.array(is_ternary))


def _by_absmean(part: Rows) -> Rows:
    sizes = np.abs(part)
    is_ternary = ((sizes == 0) | (sizes == sizes.max(axis=1, keepdims=True))).all(axis=1, keepdims=True)
    return _absmean(part, np.maximum(sizes.mean(axis=1, keepdims=True), SMALLEST), is_ternary)


def _absmean(values: Rows, scale: Rows, is_ternary: npt.NDArray[np.bool_]) -> Rows:
    share = np.abs(values) / scale
    rounded = np.where(share > 0.5, np.sign(values) * scale, 0.0)
    rounded[np.abs(share - 0.5) < AMBIGUOUS] = np.nan
    return np.where(is_ternary, values, rounded)


def i2_s_rows(data: npt.NDArray[np.uint8], rows: Sequence[int], shape: tuple[int, int]) -> Rows:
    """Return rows of an I2_S tensor: element e of a window of 128 is in byte e mod 32, bits 6 - 2 (e / 32)."""
    scale = float(data[shape[0] * shape[1] // 4 :][:4].copy().view("<f4")[0])
    place = np.asarray(rows)[:, None] * shape[1] + np.arange(shape[1])[None]
    window, element = place // 128, place % 128
    byte = data[window * 32 + element % 32].astype(np.int64)
    rows_of_codes: Rows = byte // 4 ** (3 - element // 32) % 4 - 1.0
    return rows_of_codes * scale


def q2_0_rows(data: npt.NDArray[np.uint8], rows: Sequence[int], columns: int, group: int) -> Rows:
    """Return rows of a Q2_0 tensor: element e of a block is in bits 2 (e mod 4) of byte 2 + e / 4, behind a float16."""
    lines = data.reshape(-1, columns // group, 2 + group // 4)[list(rows)]
    scales = np.ascontiguousarray(lines[:, :, :2]).view("<f2").astype(np.float64)[:, :, 0]
    k = np.arange(columns)
    byte = lines[:, k // group, 2 + k % group // 4].astype(np.int64)
    picked: Rows = (byte // 4 ** (k % 4) % 4 - 1) * scales[:, k // group]
    return picked


def interleaved_row(row: int, head_dim: int) -> int:
    """Return where llama.cpp's converter puts a row of q or k: the two halves of each head alternate."""
    head, inside = divmod(row, head_dim)
    half, index = divmod(inside, head_dim // 2)
    return head * head_dim + 2 * index + half


def blocks16x32_rows(stored: npt.NDArray[np.uint8], rows: Sequence[int], columns: int) -> Rows:
    """Return rows of codes in the published engine's blocks of 16 x 32; see `Blocks16x32` for the place of each."""
    data = stored.reshape(-1)
    k = np.arange(columns)
    result = []
    for n in rows:
        word = (n // 16 * (columns // 32) + k // 32) * 32 + n % 16 // 8 * 16 + k % 32 // 16 * 8 + n % 8
        element = k % 16
        byte = data[4 * word + element % 4].astype(np.int64)
        result.append(byte // 4 ** (element // 4) % 4 - 2.0)
    return np.stack(result)
