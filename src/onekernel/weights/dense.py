"""Dense bf16 weights in the order in which the tensor cores take them: the one copy that every kernel reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TILE_ROWS = 8
TILE_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class PackedDense:
    """A (rows, columns) bf16 matrix in tiles of 8 rows x 64 columns, 1 KiB each, row tile by row tile.

    `tiles` has shape (row tiles, column tiles, 512). Value [half, row, quarter, e] of a tile's (2, 8, 4, 8) is column
    16 * quarter + 8 * half + e of row `row`: lane 4 * row + quarter of a warp finds its B fragments of four
    mma.m16n8k16 in two loads of 16 consecutive bytes, and a warp's load is 512 bytes without bank conflicts. The order
    of columns inside a tile does not matter to a sum, as long as the activations have the same. Rows are padded to 8
    and columns to 64 with zeros, so kernels have no code for tails.
    """

    tiles: torch.Tensor
    rows: int
    columns: int

    @classmethod
    def pack(cls, weight: torch.Tensor) -> PackedDense:
        """Return the packed form of a (rows, columns) matrix, rounded to bf16, on its device."""
        rows, columns = weight.shape
        row_tiles, column_tiles = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
        if rows % TILE_ROWS or columns % TILE_COLUMNS:
            padding = (0, column_tiles * TILE_COLUMNS - columns, 0, row_tiles * TILE_ROWS - rows)
            weight = torch.nn.functional.pad(weight, padding)
        tiles = weight.to(torch.bfloat16).view(row_tiles, 8, column_tiles, 4, 2, 8).permute(0, 2, 4, 1, 3, 5)
        return cls(tiles.reshape(row_tiles, column_tiles, 512), rows, columns)

    def unpack(self) -> torch.Tensor:
        """Return the bf16 matrix (rows, columns) without its padding."""
        row_tiles, column_tiles, _ = self.tiles.shape
        matrix = self.tiles.view(row_tiles, column_tiles, 2, 8, 4, 8).permute(0, 3, 1, 4, 2, 5)
        return matrix.reshape(row_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS)[: self.rows, : self.columns]
