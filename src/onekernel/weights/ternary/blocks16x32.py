"""The published layout of ternary weights, as microsoft/BitNet's GPU engine converts and reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from onekernel.errors import ConfigError
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
        16 or not the sum of `rows`, K none of 32, or a code is 0, which the layout does not use.
        """
        if codes.dim() != 2 or codes.dtype not in (torch.int8, torch.uint8):
            raise ConfigError(f"published codes must be int8 (N, K / 4), not {codes.dtype} {tuple(codes.shape)}")
        n, k = codes.shape[0], codes.shape[1] * 4
        if n % STRIP_ROWS or k % cls.COLUMNS:
            raise ConfigError(f"published codes of {n} rows and {k} columns; they come in blocks of 16 x 32")
        stored = codes.contiguous().view(torch.uint8).view(n // STRIP_ROWS, -1)
        if int(((stored | stored >> 1) & 0x55).min()) != 0x55:
            raise ConfigError("code 0 in published codes, where -1, 0 and 1 are 1, 2 and 3: is this another packing?")
        rows = rows or (n,)
        if sum(rows) != n or tuple(scales.shape) != (len(rows),):
            raise ConfigError(f"projections of {rows} rows with scales {tuple(scales.shape)} in {n} published rows")
        return cls(stored, scales.repeat_interleave(torch.tensor(rows, device=scales.device)), (n, k), rows, None)

    @staticmethod
    def _to_bytes(codes: torch.Tensor) -> torch.Tensor:
        strips, blocks = codes.shape[0] // 16, codes.shape[1] // 32
        # Four codes at once: (strip, row half, row, block, column half, bit pair). A code stays in its byte.
        first, second, third, fourth = codes.view(torch.int32).view(strips, 2, 8, blocks, 2, 4).unbind(5)
        packed = first | second << 2 | third << 4 | fourth << 6
        return packed.permute(0, 3, 1, 4, 2).reshape(strips, blocks * 32).view(torch.uint8)

    @staticmethod
    def _from_bytes(packed: torch.Tensor) -> torch.Tensor:
        strips, blocks = packed.shape[0], packed.shape[1] // 128
        words = packed.contiguous().view(torch.int32).view(strips, blocks, 2, 2, 8).permute(0, 2, 4, 1, 3).contiguous()
        codes = words.new_empty((*words.shape, 4))
        for pair in range(4):
            torch.bitwise_and(words >> 2 * pair, 0x03030303, out=codes[..., pair])
        return codes.view(strips * 16, blocks * 8).view(torch.uint8)
