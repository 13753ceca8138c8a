"""The GPU's side of a feed-forward in training: what kernels/sparse/train_*.cu want, and in which order they run."""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onekernel.device.facts import facts
from onekernel.errors import ConfigError
from onekernel.kernels.sparse_training import TrainingKernels, TrainingShape
from onekernel.ops.training_formulas import WORD, Gradients, Weights
from onekernel.ops.training_hot import hot_backward, hot_forward

TURN_TOKENS = 6144
"""Tokens whose gate values are in memory at a time: 69 MB for 5,632 neurons, and 1,056 tiles of 128 x 256, eight for
each of an H200's multiprocessors."""

HIDDEN_MULTIPLE, INNER_MULTIPLE, HOT_MULTIPLE = 8, 32, 8


class Forward(NamedTuple):
    """What the forward gives."""

    out: Tensor
    total: Tensor
    """The sum of all |h|."""
    masks: Tensor
    """Without hot neurons."""
    row_counts: Tensor
    first: Tensor
    """Of the hot neurons, (tokens, `hot_columns`); those that only fill up are zeros."""


def hot_columns(hot: Tensor) -> int:
    """Return how many columns the products of so many hot neurons have: as many, up to a multiple of 8."""
    return -(-len(hot) // HOT_MULTIPLE) * HOT_MULTIPLE


def forward_on_gpu(x: Tensor, weights: Weights, hot: Tensor, square: bool) -> Forward:
    """Return the feed-forward of (tokens, hidden) bf16, of which the `hot` neurons are multiplied densely."""
    return forward_with(_kernels(x, weights, square, float_gradients=False), x, weights, hot)


def forward_with(kernels: TrainingKernels, x: Tensor, weights: Weights, hot: Tensor) -> Forward:
    """Do it with these kernels, which may be the shim's on a CPU. Raises ConfigError for another dtype than bf16."""
    _check(x, weights)
    (tokens, hidden), hots = x.shape, hot.to(torch.int32)
    first, up, down = padded(weights.first), padded(weights.up), padded(weights.down_rows)
    x = _columns(x)
    out = torch.empty_like(x)
    masks = torch.empty(tokens, len(first) // WORD, dtype=torch.int32, device=x.device)
    counts = torch.empty(tokens, dtype=torch.int32, device=x.device)
    sums = torch.empty(tokens, device=x.device)
    kept = x.new_empty(tokens, hot_columns(hot))
    for begin in range(0, tokens, TURN_TOKENS):
        turn = slice(begin, begin + TURN_TOKENS)
        values = F.linear(x[turn], first)
        kernels.masks(values, hots, masks[turn], counts[turn], kept[turn])
        kernels.forward(x[turn], values, masks[turn], up, down, sums[turn], out[turn], accumulate=False)
        del values  # before the next turn's are made
    if len(hot):
        chosen = Weights(None if weights.gate is None else first[hot], up[hot], down[hot])
        hot_forward(kernels, x, filled(chosen, kept.shape[1]), kept, sums, out)
    return Forward(out[:, :hidden].contiguous(), sums.sum(), masks, counts, kept)


def hot_backward_on_gpu(
    grad_out: Tensor,
    grad_total: Tensor,
    x: Tensor,
    weights: Weights,
    first: Tensor,
    square: bool,
    gradient_dtype: torch.dtype,
) -> Gradients:
    """Return the gradients of x and of the hot neurons' weights; first: the forward's, which may have more columns."""
    kernels = _kernels(x, weights, square, float_gradients=False)
    return hot_backward_with(kernels, grad_out, grad_total, x, weights, first, gradient_dtype)


def hot_backward_with(
    kernels: TrainingKernels,
    grad_out: Tensor,
    grad_total: Tensor,
    x: Tensor,
    weights: Weights,
    first: Tensor,
    gradient_dtype: torch.dtype,
) -> Gradients:
    """Do it with these kernels, which may be the shim's on a CPU."""
    neurons, l1 = len(weights.up), grad_total.reshape(1).float()
    weights = filled(weights, first.shape[1])
    found = hot_backward(kernels, grad_out, l1, x.contiguous(), weights, first, gradient_dtype)
    gate_grad = None if found.gate is None else found.gate[:neurons]
    return Gradients(found.x, gate_grad, found.up[:neurons], found.down_rows[:neurons])


def filled(weights: Weights, neurons: int) -> Weights:
    """Return the weights with neurons of zeros up to so many."""
    missing = (0, 0, 0, neurons - len(weights.up))
    if not any(missing):
        return weights
    return Weights(*(None if weight is None else F.pad(weight, missing) for weight in weights))  # type: ignore[arg-type]


def backward_on_gpu(
    grad_out: Tensor,
    grad_total: Tensor,
    x: Tensor,
    weights: Weights,
    masks: Tensor,
    base: Tensor | None,
    square: bool,
    gradient_dtype: torch.dtype,
) -> Gradients:
    """Return the gradients of the neurons in `masks`; x's is added to `base`, those of weights are float32 or bf16."""
    floats = gradient_dtype is not torch.bfloat16
    kernels = _kernels(x, weights, square, float_gradients=floats)
    return backward_with(kernels, grad_out, grad_total, x, weights, masks, base)


def backward_with(
    kernels: TrainingKernels,
    grad_out: Tensor,
    grad_total: Tensor,
    x: Tensor,
    weights: Weights,
    masks: Tensor,
    base: Tensor | None,
) -> Gradients:
    """Do it with these kernels, which may be the shim's on a CPU."""
    hidden, neurons = x.shape[1], len(weights.up)
    gate = None if weights.gate is None else padded(weights.gate)
    up, down = padded(weights.up), padded(weights.down_rows)
    x, grad_out, l1 = _columns(x), _columns(grad_out), grad_total.reshape(1).float()
    grad_x = torch.empty_like(x) if base is None else _columns(base)
    kernels.backward_tokens(x, grad_out, l1, masks, gate, up, down, grad_x, accumulate=base is not None)
    by_neuron = kernels.transpose(masks)[0]
    gate_grad, up_grad, down_grad = kernels.weight_gradients(x, grad_out, l1, by_neuron, gate, up, down)
    part = (slice(neurons), slice(hidden))
    return Gradients(
        grad_x[:, :hidden].contiguous(),
        None if gate_grad is None else gate_grad[part],
        up_grad[part],
        down_grad[part],
    )


def takes_hidden(hidden: int, device: torch.device) -> bool:
    """Return whether the kernels take feed-forwards of this hidden_size on a GPU."""
    shape = TrainingShape(-(-hidden // HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE)
    return shape.fits(facts(f"cuda:{device.index or 0}").shared_bytes_per_block)


def count_on_gpu(masks: Tensor, neurons: int) -> Tensor:
    """Return by neuron the tokens whose bit is set, (neurons,) int64."""
    kernels = _made(masks.device.index, TrainingShape(hidden=HIDDEN_MULTIPLE))
    return kernels.transpose(masks)[1][:neurons].to(torch.int64)


def _kernels(x: Tensor, weights: Weights, square: bool, *, float_gradients: bool) -> TrainingKernels:
    hidden = -(-x.shape[1] // HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE
    gated = weights.gate is not None
    return _made(x.device.index, TrainingShape(hidden, gated=gated, square=square, float_gradients=float_gradients))


@cache
def _made(index: int, shape: TrainingShape) -> TrainingKernels:
    """Return the kernels of one GPU, compiled for it when they are first used."""
    from onekernel.device.cuda_kernel import load_operator  # late: needs a driver

    found = facts(f"cuda:{index}")
    load = partial(load_operator, device=f"cuda:{index}")
    return TrainingKernels(shape, load, found.sm_count, found.shared_bytes_per_block)


def _check(x: Tensor, weights: Weights) -> None:
    if x.dtype is not torch.bfloat16:
        raise ConfigError(f"x is {x.dtype}; the sparse route takes bfloat16 on a GPU: use autocast, or the dense route")


def padded(matrix: Tensor) -> Tensor:
    """Return an (intermediate, hidden) matrix with zeros up to what the kernels take; itself if nothing is missing."""
    missing = (0, -matrix.shape[1] % HIDDEN_MULTIPLE, 0, -matrix.shape[0] % INNER_MULTIPLE)
    return F.pad(matrix, missing) if any(missing) else matrix.contiguous()


def _columns(x: Tensor) -> Tensor:
    missing = -x.shape[1] % HIDDEN_MULTIPLE
    return F.pad(x, (0, missing)) if missing else x.contiguous()
