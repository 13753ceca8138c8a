"""The neurons of a feed-forward in training that are multiplied densely: PyTorch's products, some tokens at a time.

In turns, because between the products lie half a dozen matrices of tokens x neurons; gradients of weights are added up
over the turns in float32, in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onekernel.ops import training_formulas as formulas
from onekernel.ops.training_formulas import Gradients, Weights

TURN_TOKENS = 4096


class Hot(NamedTuple):
    """What the forward gives for the hot neurons; the two products are kept for the backward, (tokens, hot)."""

    out: Tensor
    total: Tensor
    first: Tensor
    up: Tensor | None


def hot_forward(x: Tensor, weights: Weights, square: bool) -> Hot:
    """Return the feed-forward of (tokens, hidden) by these neurons alone."""
    first, up = formulas.products(x, weights)
    out = torch.empty(x.shape, dtype=formulas.sum_dtype(x), device=x.device)
    total = x.new_zeros((), dtype=formulas.penalty_dtype(x))
    for begin in range(0, len(x), TURN_TOKENS):
        turn = slice(begin, begin + TURN_TOKENS)
        out[turn], part = formulas.forward(x[turn], weights, first[turn], None if up is None else up[turn], square)
        total += part
    return Hot(out, total, first, up)


def hot_backward(
    grad_out: Tensor, grad_total: Tensor, x: Tensor, weights: Weights, first: Tensor, up: Tensor | None, square: bool
) -> Gradients:
    """Return the gradients of x and of these neurons' weights; first and up are what `hot_forward` kept."""
    grad_x = torch.empty(x.shape, dtype=formulas.sum_dtype(x), device=x.device)
    kept = [
        None if weight is None else weight.new_zeros(weight.shape, dtype=formulas.penalty_dtype(x))
        for weight in weights
    ]
    for begin in range(0, len(x), TURN_TOKENS):
        turn = slice(begin, begin + TURN_TOKENS)
        product = None if up is None else up[turn]
        active = first[turn] > 0
        part = formulas.backward(grad_out[turn], grad_total, x[turn], weights, first[turn], product, active, square)
        grad_x[turn] = part.x
        for whole, more in zip(kept, part[1:], strict=True):
            if whole is not None and more is not None:
                whole += more
    return Gradients(grad_x, kept[0], *kept[1:])  # type: ignore[arg-type]  # only a gate can be missing
