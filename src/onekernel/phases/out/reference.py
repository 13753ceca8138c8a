"""Reference of the out phase."""

from __future__ import annotations

import torch

from onekernel.phases.linear import Weight, linear, normed_linear


def out(
    residual: torch.Tensor,
    mixed: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    sub_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Return residual + mixed @ weight.T + bias, float32; with `sub_norm` (q_size,) mixed is normed first.

    mixed: (tokens, q_size); weight: (hidden_size, q_size).
    """
    if sub_norm is None:
        return residual + linear(mixed, weight, bias)
    return residual + normed_linear(mixed, sub_norm, eps, weight, bias)
