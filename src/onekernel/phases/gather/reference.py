"""Reference of the gather phase."""

from __future__ import annotations

import torch


def gather(residual: torch.Tensor, down: torch.Tensor, neurons: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    """Return residual (1, hidden_size) float32 plus inner (n,) times the columns `neurons` (n,) of down.

    down: (hidden_size, intermediate_size); the columns of other neurons are not read.
    """
    return residual + (down[:, neurons].float() @ inner)[None]
