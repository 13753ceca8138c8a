"""Reference of the qkv phase."""

from __future__ import annotations

import torch

from onekernel.phases.linear import Weight, normed_linear


def qkv(
    residual: torch.Tensor, norm: torch.Tensor, eps: float, weight: Weight, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return raw queries, keys and values side by side: (tokens, q_size + 2 * kv_size), float32.

    residual: (tokens, hidden_size) float32; weight: rows of q, k, v in this order, (q_size + 2 * kv_size, hidden_size).
    QK-norm and RoPE need a whole head and belong to the attention phase.
    """
    return normed_linear(residual, norm, eps, weight, bias)
