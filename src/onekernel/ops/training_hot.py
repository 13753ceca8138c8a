"""The neurons of a feed-forward in training that are multiplied densely: PyTorch's products, some tokens at a time.

In turns, because between the products lie half a dozen matrices of tokens x neurons; gradients of weights are added up
over the turns in float32, in order. The first product is kept for the backward, because it decides who is active; the
second is made again, in the same turns and so to the same bits: a tenth of the work here, for half of what is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from onekernel.ops import training_formulas as formulas
from onekernel.ops.training_formulas import Gradients, Weights

TURN_TOKENS = 4096


class Hot(NamedTuple):
    """What the forward gives for the hot neurons; `first`, (tokens, hot), is kept for the backward."""

    out: Tensor
    total: Tensor
    first: Tensor


def hot_forward(x: Tensor, weights: Weights, square: bool) -> Hot:
    """Return the feed-forward of (tokens, hidden) by these neurons alone."""
    first = formulas.product(x, weights.first)
    out = torch.empty(x.shape, dtype=formulas.sum_dtype(x), device=x.device)
    total = x.new_zeros((), dtype=formulas.penalty_dtype(x))
    for turn in _turns(x):
        out[turn], part = formulas.forward(x[turn], weights, first[turn], _up(x[turn], weights), square)
        total += part
    return Hot(out, total, first)


def hot_backward(
    grad_out: Tensor,
    grad_total: Tensor,
    x: Tensor,
    weights: Weights,
    first: Tensor,
    square: bool,
    gradient_dtype: torch.dtype,
) -> Gradients:
    """Return the gradients of x and of these neurons' weights, the latter rounded once; first: the forward's."""
    grad_x = torch.empty(x.shape, dtype=formulas.sum_dtype(x), device=x.device)
    sums = [
        None if weight is None else weight.new_zeros(weight.shape, dtype=formulas.penalty_dtype(x))
        for weight in weights
    ]
    for turn in _turns(x):
        _add_turn(grad_x[turn], sums, grad_out[turn], grad_total, x[turn], weights, first[turn], square)
    gate, up, down_rows = (None if total is None else total.to(gradient_dtype) for total in sums)
    return Gradients(grad_x, gate, up, down_rows)  # type: ignore[arg-type]  # only a gate can be missing


def _add_turn(
    grad_x: Tensor,
    sums: list[Tensor | None],
    grad_out: Tensor,
    grad_total: Tensor,
    x: Tensor,
    weights: Weights,
    first: Tensor,
    square: bool,
) -> None:
    """Write the gradient of a turn's x and add those of the weights; what is made on the way ends with the call."""
    part = formulas.backward(grad_out, grad_total, x, weights, first, _up(x, weights), first > 0, square)
    grad_x.copy_(part.x)
    for total, more in zip(sums, part[1:], strict=True):
        if total is not None and more is not None:
            total += more


def _turns(x: Tensor) -> Iterator[slice]:
    return (slice(begin, begin + TURN_TOKENS) for begin in range(0, len(x), TURN_TOKENS))


def _up(x: Tensor, weights: Weights) -> Tensor | None:
    return None if weights.gate is None else formulas.product(x, weights.up)
