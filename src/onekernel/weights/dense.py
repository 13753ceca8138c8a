"""Dense bf16 weights in the order in which the tensor cores take them: the one copy that every kernel reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TILE_ROWS = 8
TILE_COLUMNS = 64
_UNIT_VALUES = TILE_ROWS * TILE_COLUMNS


@dataclass(frozen=True, slots=True)
class PackedDense:
    """A (rows, columns) bf16 matrix in tiles of 8 rows x 64 columns, 1 KiB each, row tile by row tile.

    `tiles` has shape (row tiles, column tiles, 512). Value [half, row, quarter, e] of a tile's (2, 8, 4, 8) is column
    16 * quarter + 8 * half + e of row `row`: lane 4 * row + quarter of a warp finds its B fragments of four
    mma.m16n8k16 in two loads of 16 consecutive bytes, and a warp's load is 512 bytes without bank conflicts. The order
    of columns inside a tile does not matter to a sum, as long as the activations have the same. Rows are padded to 8
    and columns to 64 with zeros, so kernels have no code for tails.

    With `tile_rows` 4 a tile is 4 rows x 128 columns: its columns 64 to 127 stand where rows 4 to 7 would.
    """

    tiles: torch.Tensor
    rows: int
    columns: int
    tile_rows: int = TILE_ROWS

    @classmethod
    def pack(cls, weight: torch.Tensor, tile_rows: int = TILE_ROWS, tiles: torch.Tensor | None = None) -> PackedDense:
        """Return the packed form of a (rows, columns) matrix, rounded to bf16, on its device.

        `tiles`, contiguous bf16 of the packed shape, is filled in place if given; more row tiles in it become zeros.
        """
        rows, columns = weight.shape
        tile_columns = _UNIT_VALUES // tile_rows
        row_tiles = -(-rows // tile_rows) if tiles is None else tiles.shape[0]
        column_tiles = -(-columns // tile_columns)
        if tiles is None:
            tiles = weight.new_empty((row_tiles, column_tiles, _UNIT_VALUES), dtype=torch.bfloat16)
        padding = (0, column_tiles * tile_columns - columns, 0, row_tiles * tile_rows - rows)
        if any(padding):
            weight = torch.nn.functional.pad(weight, padding)
        split = TILE_ROWS // tile_rows
        in_order = weight.reshape(row_tiles, tile_rows, column_tiles, split, 4, 2, 8).permute(0, 2, 5, 3, 1, 4, 6)
        tiles.view(row_tiles, column_tiles, 2, split, tile_rows, 4, 8).copy_(in_order)
        return cls(tiles, rows, columns, tile_rows)

    def by_rows(self) -> torch.Tensor:
        """Return a view in the matrix's own order: (row tiles, tile_rows, column tiles, 8 / tile_rows, 4, 2, 8)."""
        row_tiles, column_tiles, _ = self.tiles.shape
        split = TILE_ROWS // self.tile_rows
        in_order = self.tiles.view(row_tiles, column_tiles, 2, split, self.tile_rows, 4, 8)
        return in_order.permute(0, 4, 1, 3, 5, 2, 6)

    def unpack(self) -> torch.Tensor:
        """Return a copy of the bf16 matrix (rows, columns) without its padding."""
        matrix = self.by_rows().reshape(self.tiles.shape[0] * self.tile_rows, -1)
        return matrix[: self.rows, : self.columns]
