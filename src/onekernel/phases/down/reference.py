"""Reference of the down phase."""

from __future__ import annotations

import torch

from onekernel.phases.linear import linear


def down(residual: torch.Tensor, inner: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return residual + inner @ weight.T + bias, float32. weight: (hidden_size, intermediate_size)."""
    return residual + linear(inner, weight, bias)
