"""What ternary products and their operators agree on of activations: the bounds of their size, and the root of a norm.

They are items 2 and 5 of the rounding contract in onekernel/phases/ternary.py.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

SMALLEST_ABSMAX = 1e-5
"""Lower bound of a token's largest absolute value, as in the models' own code."""
SMALLEST_BEFORE_NORM = 1e-10
"""The same where a norm follows, which may make it 1 / sqrt(eps) times as large."""

_SHAPE = (32, 4, 4)
"""Of the squares of 512 columns: lanes of a warp, fours that a lane adds up, columns of a four."""


def root_mean_square(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return sqrt(mean(x^2) + eps), (tokens, 1) float32, of x (tokens, K) float32 in the contract's order."""
    tokens, k = x.shape
    squares = F.pad(x.square(), (0, -k % math.prod(_SHAPE))).view(tokens, -1, *_SHAPE)
    first, *others = _in_halves(squares).unbind(1)
    for sums in others:
        first = first + sums
    mean = _in_halves(_in_halves(first))[:, None] * (1 / k)
    # PyTorch's root of many floats on a CPU is a unit off in 1 of 150; a float64 one, rounded, is the nearest float.
    return (mean + eps).double().sqrt().float()


def _in_halves(values: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, whose size is a power of two."""
    while (n := values.shape[-1]) > 1:
        values = values[..., : n // 2] + values[..., n // 2 :]
    return values[..., 0]
