"""Reference of the out phase."""

from __future__ import annotations

import torch

from onekernel.phases.linear import linear


def out(residual: torch.Tensor, mixed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return residual + mixed @ weight.T + bias, float32. mixed: (tokens, q_size); weight: (hidden_size, q_size)."""
    return residual + linear(mixed, weight, bias)
