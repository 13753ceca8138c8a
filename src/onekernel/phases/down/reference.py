"""Reference of the down phase."""

from __future__ import annotations

import torch

from onekernel.phases.linear import Weight, linear, normed_linear


def down(
    residual: torch.Tensor,
    inner: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    sub_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Return residual + inner @ weight.T + bias, float32; with `sub_norm` (intermediate_size,) inner is normed first.

    inner: (tokens, intermediate_size); weight: (hidden_size, intermediate_size).
    """
    if sub_norm is None:
        return residual + linear(inner, weight, bias)
    return residual + normed_linear(inner, sub_norm, eps, weight, bias)
