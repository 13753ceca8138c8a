"""The operators of ternary weights in PyTorch: the integers, and the order of float operations, are the kernels'.

The rounding contract is that of onekernel/phases/ternary.py, which says where the models' own code rounds otherwise.
"""

from __future__ import annotations

import torch

from onekernel.weights.ternary.activations import SMALLEST_ABSMAX, SMALLEST_BEFORE_NORM, root_mean_square
from onekernel.weights.ternary.packed import PackedTernary


def linear(q: torch.Tensor, inverse: torch.Tensor, weight: PackedTernary) -> torch.Tensor:
    """Return q @ weight.T / inverse, (tokens, N) float32; q (tokens, K) int8, inverse (tokens,) float32."""
    n = weight.shape[0]
    codes = weight.unpack_codes()
    if weight.group is None:
        return _integer_sums(q, codes).float() * (weight.scales[:n] / inverse[:, None])
    scales = weight.scales.transpose(1, 2).flatten(0, 1)[:n]
    total = torch.zeros(q.shape[0], n)
    for group, (values, part) in enumerate(zip(q.split(weight.group, 1), codes.split(weight.group, 1), strict=True)):
        total += _integer_sums(values.contiguous(), part).float() * scales[:, group]
    return total / inverse[:, None]


def quantise(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q, inverse): int8 (tokens, K) near the normed x times inverse, (tokens,) float32.

    x is float32, or bf16, which then also rounds the normalised value and its product with the weight, (K,) float32.
    The root of a float32 norm is in inverse alone.
    """
    y = x.float()
    if weight is None:
        q, inverse = _quantised(y, SMALLEST_ABSMAX)
    elif x.dtype is torch.float32:
        q, inverse = _quantised(y * weight, SMALLEST_BEFORE_NORM)
        inverse = inverse * root_mean_square(y, eps)
    else:
        y = (y * (1 / root_mean_square(y, eps))).to(x.dtype).float()
        q, inverse = _quantised((y * weight).to(x.dtype).float(), SMALLEST_ABSMAX)
    return q, inverse[:, 0]


def _quantised(y: torch.Tensor, least: float) -> tuple[torch.Tensor, torch.Tensor]:
    inverse = 127 / y.abs().amax(-1, keepdim=True).clamp(min=least)
    return (y * inverse).round().nan_to_num(0).clamp(-128, 127).to(torch.int8), inverse


def _integer_sums(q: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return q @ codes.T exactly, int32."""
    if q.shape[1] == 1:  # PyTorch 2.13's product of single columns is garbage
        return q.int() * codes.int().t()
    return torch._int_mm(q, codes.t())
