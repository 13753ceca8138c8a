"""Hugging Face's packing of ternary codes: four rows of a matrix in the bit pairs of one row of bytes.

Source: transformers, integrations/bitnet.py.
"""

from __future__ import annotations

import torch

from onekernel.errors import ModelError

VALUES_PER_BYTE = 4


def packed_rows(rows: int) -> int:
    """Return the rows of bytes that hold this many rows of codes."""
    return -(-rows // VALUES_PER_BYTE)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Return uint8 (ceil(N / 4), K) for codes (N, K): byte (r, k) holds code + 1 of rows r + i * ceil(N / 4) in pair i.

    Pairs of rows beyond N hold 0.
    """
    height = packed_rows(codes.shape[0])
    stored = (codes + 1).to(torch.uint8)
    packed = torch.zeros(height, codes.shape[1], dtype=torch.uint8, device=codes.device)
    for pair, part in enumerate(stored.split(height)):
        packed[: part.shape[0]] |= part << 2 * pair
    return packed


def unpack(packed: torch.Tensor, rows: int, name: str) -> torch.Tensor:
    """Return int8 codes (rows, K).

    Raises ModelError naming the tensor for bytes of another shape, or a code of 3, which the packing has not.
    """
    if packed.dim() != 2 or packed.numel() == 0 or packed.shape[0] != packed_rows(rows):
        raise ModelError(
            f"{name} has packed codes of shape {tuple(packed.shape)}; {rows} rows are ({packed_rows(rows)}, K): "
            "fetch it again"
        )
    stored = packed.new_empty(VALUES_PER_BYTE * packed.shape[0], packed.shape[1])
    for pair, part in enumerate(stored.chunk(VALUES_PER_BYTE)):
        torch.bitwise_and(packed >> 2 * pair, 3, out=part)
    stored = stored[:rows]
    if int(stored.max()) > 2:
        raise ModelError(
            f"{name} has codes of 3, where ternary ones are 0, 1 and 2: it is packed in another way, or damaged"
        )
    return stored.view(torch.int8).sub_(1)
