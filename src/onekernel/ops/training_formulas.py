"""A ReLU feed-forward forward and backward in PyTorch: what the training kernels compute, exactly, on any device.

    h = activate(x . gate[n]) * (x . up[n]),  out = sum over n of h * down[n],  penalty = mean over tokens of sum |h|

All arithmetic is float32, or float64 for float64 inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

WORD = 32
"""Neurons in a word of a bit mask, the first in the lowest bit."""


class Weights(NamedTuple):
    """All (intermediate, hidden), in x's dtype; without a gate the activation is that of `up`."""

    gate: Tensor | None
    up: Tensor
    down_rows: Tensor

    @property
    def first(self) -> Tensor:
        """What decides who is active."""
        return self.up if self.gate is None else self.gate


class Gradients(NamedTuple):
    """Of x and the weights, in the dtype of the sums."""

    x: Tensor
    gate: Tensor | None
    up: Tensor
    down_rows: Tensor


def activate(values: Tensor, square: bool) -> Tensor:
    """Return ReLU of the values, or its square."""
    active = F.relu(values)
    return active.square() if square else active


def forward(x: Tensor, weights: Weights, first: Tensor, up: Tensor | None, square: bool) -> tuple[Tensor, Tensor]:
    """Return out and penalty (before the mean over tokens, a sum over all) from the products x . first and x . up."""
    inner = activate(_wide(first), square)
    if up is not None:
        inner = inner * _wide(up)
    inner = inner.to(x.dtype)
    return _product(inner, weights.down_rows), _wide(inner).abs().sum(dtype=penalty_dtype(x))


def backward(
    grad_out: Tensor,
    grad_penalty: Tensor,
    x: Tensor,
    weights: Weights,
    first: Tensor,
    up: Tensor | None,
    active: Tensor,
    square: bool,
) -> Gradients:
    """Return the gradients; first, up: the products x . first and x . up; active: (tokens, neurons) bool.

    grad_penalty is that of the sum over neurons and tokens of |h|.
    """
    # In place where a value is not needed again: between the products of many tokens these are the peak of memory.
    first = _wide(first).clamp(min=0).mul_(active)
    outer, slope = (first.square(), first.mul_(2)) if square else (first, active)
    up = None if up is None else _wide(up)
    inner = outer if up is None else outer * up
    grad_inner = _product(grad_out, weights.down_rows.t()).mul_(active).add_(grad_penalty * inner.sign())
    if up is None:
        grad_up = grad_inner.mul_(slope)
        grad_x, grad_gate_weight = _product(grad_up, weights.up), None
    else:
        grad_gate, grad_up = (grad_inner * up).mul_(slope), grad_inner.mul_(outer)
        grad_x = _product(grad_gate, weights.first).addmm_(grad_up, _wide(weights.up))
        grad_gate_weight = _product(grad_gate.t(), x)
    return Gradients(grad_x, grad_gate_weight, _product(grad_up.t(), x), _product(inner.t(), grad_out))


def products(x: Tensor, weights: Weights) -> tuple[Tensor, Tensor | None]:
    """Return x . first, whose rounded values decide who is active, and x . up if there is a gate; both in x's dtype."""
    return product(x, weights.first), None if weights.gate is None else product(x, weights.up)


def product(x: Tensor, rows: Tensor) -> Tensor:
    """Return x . rows, (tokens, rows) in x's dtype."""
    return _product(x, rows.t()).to(x.dtype)


def pack_bits(active: Tensor) -> Tensor:
    """Return a bit per value: (tokens, words) int32 from (tokens, neurons) bool."""
    tokens, neurons = active.shape
    words = -(-neurons // WORD)
    padded = F.pad(active, (0, words * WORD - neurons)).view(tokens, words, WORD)
    weights = 1 << torch.arange(WORD, dtype=torch.int64, device=active.device)
    return (padded * weights).sum(-1).to(torch.int32)  # bit 31 is the sign: the conversion wraps around


def unpack_bits(masks: Tensor, neurons: int) -> Tensor:
    """Return (tokens, neurons) bool from what `pack_bits` or the kernels made."""
    bits = masks[..., None] >> torch.arange(WORD, dtype=torch.int32, device=masks.device) & 1
    return bits.flatten(1)[:, :neurons] != 0


def penalty_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over values like x."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _wide(values: Tensor) -> Tensor:
    """A bf16 product of many rows on a CPU is four times slower than a float32 one."""
    return values.to(penalty_dtype(values))


def _product(left: Tensor, right: Tensor) -> Tensor:
    return _wide(left) @ _wide(right)
