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

TURN_TOKENS = 4096
"""Tokens whose gate values are in memory at a time: 46 MB for 5,632 neurons."""

HIDDEN_MULTIPLE, INNER_MULTIPLE = 8, 32


class Cold(NamedTuple):
    """What the forward gives for all but the hot neurons."""

    out: Tensor
    total: Tensor
    masks: Tensor
    row_counts: Tensor


def forward_on_gpu(x: Tensor, weights: Weights, hot: Tensor, base: Tensor | None, square: bool) -> Cold:
    """Return the feed-forward of (tokens, hidden) bf16 without the `hot` neurons, added to `base` if there is one."""
    return forward_with(_kernels(x, weights, square, float_gradients=False), x, weights, hot, base)


def forward_with(kernels: TrainingKernels, x: Tensor, weights: Weights, hot: Tensor, base: Tensor | None) -> Cold:
    """Do it with these kernels, which may be the shim's on a CPU. Raises ConfigError for another dtype than bf16."""
    _check(x, weights)
    tokens, hidden = x.shape
    # The product of a row of zeros is not active: so hot neurons drop out.
    first = padded(weights.first.index_fill(0, hot, 0) if len(hot) else weights.first)
    up, down = padded(weights.up), padded(weights.down_rows)
    x = _columns(x)
    out = torch.empty_like(x) if base is None else _columns(base)
    masks = torch.empty(tokens, len(first) // WORD, dtype=torch.int32, device=x.device)
    counts = torch.empty(tokens, dtype=torch.int32, device=x.device)
    sums = torch.empty(tokens, device=x.device)
    for begin in range(0, tokens, TURN_TOKENS):
        turn = slice(begin, begin + TURN_TOKENS)
        values = F.linear(x[turn], first)
        kernels.masks(values, masks[turn], counts[turn])
        kernels.forward(x[turn], values, masks[turn], up, down, sums[turn], out[turn], accumulate=base is not None)
        del values  # before the next turn's are made
    return Cold(out[:, :hidden].contiguous(), sums.sum(), masks, counts)


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
