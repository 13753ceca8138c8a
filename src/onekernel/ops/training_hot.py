"""The neurons of a feed-forward in training that a GPU multiplies densely: PyTorch's products, one pass between them.

The first product comes from that of all neurons, and is kept for the backward because it decides who is active; the
second is made again there: a tenth of the work here, for half of what is kept. Tokens go in turns where the matrices of
tokens x neurons would be large; gradients of weights are added up over turns in float32, in order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from onekernel.kernels.sparse_training import TrainingKernels
from onekernel.ops.training_formulas import Gradients, Weights

TURN_VALUES = 8 << 20
"""Of one matrix of tokens x neurons: the backward has three of 17 MB, at once."""

TURN_MULTIPLE = 256


def hot_forward(
    kernels: TrainingKernels, x: Tensor, weights: Weights, first: Tensor, sums: Tensor, out: Tensor
) -> None:
    """Add these neurons' part to `out`, (tokens, hidden), and the sums of |h| to `sums`; first: (tokens, neurons)."""
    for turn in _turns(first):
        rows, product = x[turn], first[turn]
        inner = torch.empty_like(product) if weights.gate is None else F.linear(rows, weights.up)
        kernels.hot_forward(product, inner, sums[turn])
        out[turn].addmm_(inner, weights.down_rows)


def hot_backward(
    kernels: TrainingKernels,
    grad_out: Tensor,
    l1: Tensor,
    x: Tensor,
    weights: Weights,
    first: Tensor,
    gradient_dtype: torch.dtype,
) -> Gradients:
    """Return the gradients of x and of these neurons' weights, the latter rounded once after the turns.

    l1: (1,) float32, the gradient of the sum of all |h|; first: as in `hot_forward`.
    """
    hots, gated = first.shape[1], weights.gate is not None
    rows = weights.up if weights.gate is None else torch.cat([weights.gate, weights.up])
    grad_x = torch.empty_like(x)
    sums: list[Tensor] = []
    for turn in _turns(first):
        tokens, grads_out = x[turn], grad_out[turn]
        grads = tokens.new_empty(len(tokens), len(rows))  # of x . gate, then of x . up: one product serves both
        if gated:
            torch.mm(tokens, weights.up.t(), out=grads[:, hots:])
        inner = torch.mm(grads_out, weights.down_rows.t())
        kernels.hot_backward(first[turn], grads, inner, l1)
        torch.mm(grads, rows, out=grad_x[turn])
        parts = [grads.t() @ tokens, inner.t() @ grads_out]
        del grads, inner  # before more is made
        sums = [total.float() + part for total, part in zip(sums, parts, strict=True)] if sums else parts
        del parts
    first_rows, down_rows = (total.to(gradient_dtype) for total in sums)
    return Gradients(grad_x, first_rows[:hots] if gated else None, first_rows[-hots:], down_rows)


def _turns(first: Tensor) -> Iterator[slice]:
    """At least one, which may be empty: its sums are zeros."""
    tokens, hots = first.shape
    turn = max(TURN_VALUES // hots // TURN_MULTIPLE, 1) * TURN_MULTIPLE
    return (slice(begin, begin + turn) for begin in range(0, max(tokens, 1), turn))
