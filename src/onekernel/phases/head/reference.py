"""Reference of the head phase."""

from __future__ import annotations

import torch

from onekernel.phases.linear import Weight, normed_linear


def head(residual: torch.Tensor, norm: torch.Tensor, eps: float, weight: Weight) -> torch.Tensor:
    """Return logits (tokens, vocab_size), float32. weight: the head, or the embedding if tied, (vocab, hidden_size)."""
    return normed_linear(residual, norm, eps, weight)
