"""Our layout of ternary weights: bytes that one mask turns into operands of the tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from onekernel.weights.ternary.packed import UNIT_COLUMNS, PackedTernary


@dataclass(frozen=True, slots=True)
class TensorCoreTiles(PackedTernary):
    """Tiles of 16 rows x 128 columns, 512 bytes each, with codes 0, 1 and 2 for -1, 0 and 1.

    Lane l of a warp finds in bytes 16 l to 16 l + 15 of a tile its A fragments of four mma.m16n8k32. Bit pair i (0 to
    3) of byte b of word j (0 to 3) is the code of row l / 4 + 8 (j % 2) and column

        64 (i / 2) + 16 (l % 4) + 8 (i % 2) + 4 (j / 2) + b      (whole divisions)

    so `word & 0x03030303 << 2 i` is register j of product i, with its codes times 4^i: no shift, no table, no
    subtraction. Each i has sums of its own, which are whole multiples of 4^i, and what the offset of the codes adds is
    the sum of the activations. The columns are in such an order that a lane's activations for products 2 p and 2 p + 1
    are 16 consecutive bytes, and that a group of 64 columns is two whole products.
    """

    LAYOUT: ClassVar[str] = "tensor_core"
    COLUMNS: ClassVar[int] = UNIT_COLUMNS
    ZERO: ClassVar[int] = 1

    @staticmethod
    def _to_bytes(codes: torch.Tensor) -> torch.Tensor:
        strips, tiles = codes.shape[0] // 16, codes.shape[1] // 128
        # Eight codes at once, of both j / 2 and all bytes: (strip, row half, row, tile, i / 2, l % 4, i % 2). A code
        # stays in its byte.
        eights = codes.view(torch.int64).view(strips, 2, 8, tiles, 2, 4, 2)
        first, second = eights.unbind(4)
        packed = first[..., 0] | first[..., 1] << 2 | second[..., 0] << 4 | second[..., 1] << 6
        words = packed.view(torch.int32).view(strips, 2, 8, tiles, 4, 2).permute(0, 3, 2, 4, 5, 1)
        return words.reshape(strips, tiles * 128).view(torch.uint8)

    @staticmethod
    def _from_bytes(packed: torch.Tensor) -> torch.Tensor:
        strips, tiles = packed.shape[0], packed.shape[1] // 512
        words = packed.contiguous().view(torch.int32).view(strips, tiles, 8, 4, 2, 2).permute(0, 5, 2, 1, 3, 4)
        eights = words.contiguous().view(torch.int64).view(strips, 2, 8, tiles, 4)
        codes = eights.new_empty((strips, 2, 8, tiles, 2, 4, 2))
        for i in range(4):
            torch.bitwise_and(eights >> 2 * i, 0x0303030303030303, out=codes[..., i // 2, :, i % 2])
        return codes.view(strips * 16, tiles * 16).view(torch.uint8)
