"""A dense matrix as int8 rows with a scale each: a head of half the bytes."""

from __future__ import annotations

import torch


def quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 values (N, K) and float32 scales (N,): scale = absmax of the row / 127, half to even, in float32."""
    values = weight.float()
    scales = values.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (values / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales
