"""Reference of the head phase."""

from __future__ import annotations

import torch

from onekernel.phases.linear import Weight, linear
from onekernel.phases.norm import rms_norm


def head(residual: torch.Tensor, norm: torch.Tensor, eps: float, weight: Weight) -> torch.Tensor:
    """Return logits (tokens, vocab_size), float32. weight: the head, or the embedding if tied, (vocab, hidden_size)."""
    return linear(rms_norm(residual, norm, eps), weight)
