"""Root-mean-square normalisation (Zhang and Sennrich, 2019), as Llama applies it."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension; x and weight float32."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
