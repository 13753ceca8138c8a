"""A dense matrix as int8 rows with a scale each: a head of half the bytes."""

from __future__ import annotations

import torch

_TILE_ROWS, _TILE_COLUMNS = 16, 32


def quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 values (N, K) and float32 scales (N,): scale = absmax of the row / 127, half to even, in float32."""
    values = weight.float()
    scales = values.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (values / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


def pack_rows(values: torch.Tensor, tiles: torch.Tensor) -> None:
    """Write int8 values (N, K) to `tiles`, uint8: 16 rows x 32 columns after one another, padded with 0.

    Lane l of a warp finds in bytes 16 l to 16 l + 15 of a tile its A fragment of one mma.m16n8k32: byte b of word j is
    row l / 4 + 8 (j % 2) and column 8 (l % 4) + 4 (j / 2) + b (whole divisions), so that its inputs lie side by side.
    """
    rows, columns = values.shape
    strips = -(-rows // _TILE_ROWS)
    padded = len(tiles) // (strips * _TILE_ROWS)
    whole = torch.nn.functional.pad(values, (0, padded - columns, 0, strips * _TILE_ROWS - rows))
    split = whole.view(strips, 2, 8, padded // _TILE_COLUMNS, 4, 2, 4).permute(0, 3, 2, 4, 5, 1, 6)
    tiles.view(torch.int8).view(split.shape).copy_(split)


def unpack_rows(tiles: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the int8 values (rows, columns) that `pack_rows` wrote."""
    strips = -(-rows // _TILE_ROWS)
    split = tiles.view(torch.int8).view(strips, -1, 8, 4, 2, 2, 4).permute(0, 5, 2, 1, 3, 4, 6)
    return split.reshape(strips * _TILE_ROWS, -1)[:rows, :columns].contiguous()
