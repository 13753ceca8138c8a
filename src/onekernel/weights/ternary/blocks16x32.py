"""The published layout of ternary weights, as microsoft/BitNet's GPU engine converts and reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from onekernel.errors import ConfigError
from onekernel.weights.ternary.matrix import TernaryMatrix
from onekernel.weights.ternary.packed import STRIP_ROWS, PackedTernary


@dataclass(frozen=True, slots=True)
class Blocks16x32(PackedTernary):
    """Blocks of 16 rows x 32 columns, 128 bytes each, with codes 1, 2 and 3 for -1, 0 and 1.

    A 32-bit word holds 16 consecutive columns of a row: column e of them in bit pair e / 4 of byte e % 4, that is, bit
    pairs 0 to 15 hold columns 0, 4, 8, 12, 1, 5, ..., so that `word >> 2 i & 0x03030303` is columns 4 i to 4 i + 3 as
    bytes in order. Word ((n % 16) / 8) * 16 + ((k % 32) / 16) * 8 + n % 8 of a block belongs to row n and columns k to
    k + 15. Source: microsoft/BitNet, gpu/pack_weight.py.
    """

    LAYOUT: ClassVar[str] = "blocks16x32"
    COLUMNS: ClassVar[int] = 32
    ZERO: ClassVar[int] = 2

    @classmethod
    def from_published(cls, codes: torch.Tensor, scales: torch.Tensor, rows: tuple[int, ...] = ()) -> Self:
        """Return a matrix over the bytes of a converted checkpoint: int8 or uint8 (N, K / 4), scales float32 (R,).

        `rows` are the rows of each fused projection, which have a scale each. Raises ConfigError if N is no multiple of
        16, K none of 32, or a code is 0, which the layout does not use.
        """
        if codes.dim() != 2 or codes.dtype not in (torch.int8, torch.uint8):
            raise ConfigError(f"published codes must be int8 (N, K / 4), not {codes.dtype} {tuple(codes.shape)}")
        n, k = codes.shape[0], codes.shape[1] * 4
        if n % STRIP_ROWS or k % cls.COLUMNS:
            raise ConfigError(f"published codes of {n} rows and {k} columns; they come in blocks of 16 x 32")
        matrix = cls._from_bytes(codes.contiguous().view(torch.uint8).view(n // STRIP_ROWS, -1))
        if int(matrix.min()) == 0:
            raise ConfigError("code 0 in published codes, where -1, 0 and 1 are 1, 2 and 3: is this another packing?")
        return cls.pack(TernaryMatrix(matrix.view(torch.int8) - cls.ZERO, scales, rows))

    @staticmethod
    def _to_bytes(codes: torch.Tensor) -> torch.Tensor:
        strips, blocks = codes.shape[0] // 16, codes.shape[1] // 32
        # (strip, row half, row, block, column half, bit pair, byte)
        split = codes.view(strips, 2, 8, blocks, 2, 4, 4).permute(5, 0, 3, 1, 4, 2, 6)
        packed = split[0] | split[1] << 2 | split[2] << 4 | split[3] << 6
        return packed.reshape(strips, blocks * 128)

    @staticmethod
    def _from_bytes(packed: torch.Tensor) -> torch.Tensor:
        strips, blocks = packed.shape[0], packed.shape[1] // 128
        fields = torch.stack([packed >> 2 * i & 3 for i in range(4)])
        split = fields.view(4, strips, blocks, 2, 2, 8, 4).permute(1, 3, 5, 2, 4, 0, 6)
        return split.reshape(strips * 16, blocks * 32)
