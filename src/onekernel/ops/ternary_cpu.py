"""The operators of ternary weights in PyTorch: the integers, and the order of float operations, are the kernels'.

The rounding contract is that of onekernel/phases/ternary.py, which says where the models' own code rounds otherwise.
"""

from __future__ import annotations

import torch

from onekernel.weights.ternary.packed import PackedTernary

LEAST = 1e-5
"""Of the largest absolute value: what the published models clamp it to before they divide."""


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
    """
    y = x.float()
    if weight is not None:
        mean = y.double().square().mean(-1, keepdim=True).float()
        root = (mean + eps).double().sqrt().float()  # PyTorch's own root of float32 is not always the nearest float
        y = (y * (1 / root)).to(x.dtype).float()
        y = (y * weight).to(x.dtype).float()
    inverse = 127 / y.abs().amax(-1, keepdim=True).clamp(min=LEAST)
    q = (y * inverse).round().nan_to_num(0).clamp(-128, 127)
    return q.to(torch.int8), inverse[:, 0]


def _integer_sums(q: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return q @ codes.T exactly, int32."""
    if q.shape[1] == 1:  # PyTorch 2.13's product of single columns is garbage
        return q.int() * codes.int().t()
    return torch._int_mm(q, codes.t())
