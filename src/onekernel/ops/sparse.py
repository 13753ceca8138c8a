"""A feed-forward whose activation is zero for most neurons of a token, as an operator of PyTorch.

    y = sum over neurons n of activate(x . gate[n]) * (x . up[n]) * down[n]

Every zero is an up row and a down row that need not be read. The result is that of the dense feed-forward on every
route: the gate's product is rounded to x's dtype, then the inner activation, then the result; sums are float32.
"""

from __future__ import annotations

from functools import cache, partial
from typing import get_args

import torch
import torch.nn.functional as F

from onekernel.device.facts import DeviceFacts, facts
from onekernel.errors import ConfigError
from onekernel.kernels.sparse_ffn import (
    GATHERED,
    HIDDEN_MULTIPLE,
    INNER_MULTIPLE,
    OVERFLOWED,
    PACKED,
    SHARED_BYTES,
    SLICED,
    TOTALS,
    Activation,
    Slices,
    SparseKernels,
    SparseShape,
)
from onekernel.ops.sparse_route import Route
from onekernel.ops.sparse_training import train_ffn
from onekernel.ops.training_route import TrainingRoute
from onekernel.weights.neuron_rows import DownProjection
from onekernel.weights.twell import TILE_COLUMNS, Twell, TwellStatistics, gated_product


def sparse_ffn(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    up: torch.Tensor,
    down: DownProjection,
    *,
    activation: Activation = "relu",
    route: Route | None = None,
    totals: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the feed-forward of x, (..., hidden), in x's dtype; without `gate`, activate(x . up[n]) * down[n].

    gate, up: (intermediate, hidden), as in nn.Linear. `route` says how (None: densely, as nothing was measured; a
    `SparseFFN` measures). totals: (4,) int32 on x's device, to which the sparse kernels add what they did (see
    `kernels.sparse_ffn`). Where a gradient is wanted `sparse_training.train_ffn` runs. Raises ConfigError for a down
    projection of unknown layout, shapes or dtypes that do not fit, and routes that cannot be taken.
    """
    _check(x, gate, up, down, activation)
    if totals is None:
        totals = torch.zeros(TOTALS, dtype=torch.int32, device=x.device)
    _check_totals(totals, x.device)
    out = run(x.reshape(-1, x.shape[-1]), gate, up, down.rows, totals, None, activation, route or Route())
    return out.view(x.shape)


def run(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    up: torch.Tensor,
    down_rows: torch.Tensor,
    totals: torch.Tensor,
    measured: torch.Tensor | None,
    activation: Activation,
    route: Route,
) -> torch.Tensor:
    """Return the feed-forward of (tokens, hidden), unchecked; `measured` as in the operator."""
    needs_grad = (tensor is not None and tensor.requires_grad for tensor in (x, gate, up, down_rows))
    if torch.is_grad_enabled() and any(needs_grad):
        return _differentiable(x, gate, up, down_rows, activation, route)
    out: torch.Tensor = _sparse_ffn(
        x, gate, up, down_rows, totals, measured, activation, route.name, route.hot, route.capacity
    )
    return out


@torch.library.custom_op("onekernel::sparse_ffn", mutates_args=("totals", "measured"))
def _sparse_ffn(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    up: torch.Tensor,
    down_rows: torch.Tensor,
    totals: torch.Tensor,
    measured: torch.Tensor | None,
    activation: str,
    route: str,
    hot: int,
    capacity: int,
) -> torch.Tensor:
    """Return (tokens, hidden); fills `measured`, if given, with what TwellStatistics.measure finds.

    Its length says the width of the tiles.
    """
    _check_activation(activation)
    shape = SparseShape(gated=gate is not None, activation=activation)  # type: ignore[arg-type]  # checked
    way = Route(route, hot, capacity)  # type: ignore[arg-type]  # Route checks the name
    if len(x) == 0:
        return torch.empty_like(x)
    if not x.is_cuda:
        return on_cpu(shape, x, gate, up, down_rows, totals, measured, way)
    return on_gpu(_kernels(x.device.index, shape), x, gate, up, down_rows, totals, measured, way)


@_sparse_ffn.register_fake
def _(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    up: torch.Tensor,
    down_rows: torch.Tensor,
    totals: torch.Tensor,
    measured: torch.Tensor | None,
    activation: str,
    route: str,
    hot: int,
    capacity: int,
) -> torch.Tensor:
    return x.new_empty(x.shape)


def on_gpu(
    kernels: SparseKernels,
    x: torch.Tensor,
    gate: torch.Tensor | None,
    up: torch.Tensor,
    down_rows: torch.Tensor,
    totals: torch.Tensor,
    measured: torch.Tensor | None,
    route: Route,
) -> torch.Tensor:
    """Return the feed-forward of (tokens, hidden) with these kernels, which may be the shim's on a CPU.

    Raises ConfigError for another dtype than bf16.
    """
    if any(tensor.dtype is not torch.bfloat16 for tensor in (x, up, down_rows)):
        raise ConfigError(f"x is {x.dtype}, up {up.dtype}; the kernels take bfloat16: convert them")
    hidden = x.shape[1]
    up, down_rows = pad_weights(up), pad_weights(down_rows)
    gate = None if gate is None else pad_weights(gate)
    x = pad_columns(x, up.shape[1])
    values = F.linear(x, up if gate is None else gate)
    if measured is not None:
        _measure(values, measured)
    if route.name == "gather":
        out = torch.empty_like(x)
        kernels.gather(x, values, up, down_rows, totals, out)
        return out[:, :hidden].contiguous()
    dense = len(up) if route.name == "dense" else route.hot
    if dense:
        other = torch.empty_like(values[:, :dense]) if gate is None else F.linear(x, up[:dense])
        out = kernels.product(values, other) @ down_rows[:dense]
    else:
        out = torch.empty_like(x)
    if dense < len(up):
        slices = Slices.plan(
            kernels.shape,
            x.shape[1],
            len(up),
            first=dense,
            capacity=route.capacity,
            shared_bytes=kernels.shared_bytes,
        )
        kernels.sliced(x, values, up, down_rows, slices, totals, out, accumulate=dense > 0)
    return out[:, :hidden].contiguous()


def on_cpu(
    shape: SparseShape,
    x: torch.Tensor,
    gate: torch.Tensor | None,
    up: torch.Tensor,
    down_rows: torch.Tensor,
    totals: torch.Tensor,
    measured: torch.Tensor | None,
    route: Route,
) -> torch.Tensor:
    """Return the feed-forward of (tokens, hidden) in float32 arithmetic; sparse routes go through `Twell`."""

    def activate(values: torch.Tensor) -> torch.Tensor:
        return F.relu(values).square() if shape.activation == "relu2" else F.relu(values)

    values = _linear(x, up if gate is None else gate).to(x.dtype)
    if measured is not None:
        _measure(values, measured)
    dense = len(up) if route.name == "dense" else route.hot
    inner = activate(values[:, :dense].float())
    if gate is not None:
        inner = inner * _linear(x, up[:dense])
    out = inner.to(x.dtype).float() @ down_rows[:dense].float()
    if dense < len(up):
        if x.dtype is not torch.bfloat16:
            raise ConfigError(f"x is {x.dtype}; the {route.name} route takes bfloat16: convert it, or go densely")
        packed = Twell.pack(F.relu(values[:, dense:]), min(route.capacity, TILE_COLUMNS))
        out += gated_product(packed, x, None if gate is None else up[dense:], down_rows[dense:], activate)
        if route.name == "gather":
            totals[GATHERED] += len(x)
        else:
            totals[PACKED] += int(packed.counts.sum())
            totals[OVERFLOWED] += len(packed.overflow_rows)
            totals[GATHERED] += len(packed.overflow_rows)
            totals[SLICED] += len(x)
    return out.to(x.dtype)


def _differentiable(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    up: torch.Tensor,
    down_rows: torch.Tensor,
    activation: Activation,
    route: Route,
) -> torch.Tensor:
    way = TrainingRoute()
    if route.name != "dense":
        way = TrainingRoute("sparse", torch.arange(route.hot, device=x.device) if route.hot else None)
    return train_ffn(x, gate, up, down_rows.t(), activation=activation, route=way).out


def _check_activation(activation: str) -> None:
    if activation not in get_args(Activation):
        raise ConfigError(f"activation is {activation!r}; it must be {' or '.join(get_args(Activation))}")


def shared_bytes(device: torch.device) -> int:
    """Return the shared memory that a CTA may have on a device; for a CPU, which has none, Hopper's."""
    return _facts(device.index or 0).shared_bytes_per_block if device.type == "cuda" else SHARED_BYTES


@cache
def _kernels(index: int, shape: SparseShape) -> SparseKernels:
    """Return the kernels of one GPU, compiled for it when they are first used."""
    from onekernel.device.cuda_kernel import load_operator  # late: needs a driver

    found = _facts(index)
    load = partial(load_operator, device=f"cuda:{index}")
    return SparseKernels(shape, load, found.sm_count, found.shared_bytes_per_block)


@cache
def _facts(index: int) -> DeviceFacts:
    return facts(f"cuda:{index}")


def _check(
    x: torch.Tensor, gate: torch.Tensor | None, up: torch.Tensor, down: DownProjection, activation: Activation
) -> None:
    if not isinstance(down, DownProjection):
        raise ConfigError(
            f"the down projection is a {type(down).__name__}, which does not say how it lies; give "
            f"DownProjection.from_linear(weight) for (hidden, intermediate), or from_rows for the transposed matrix"
        )
    down.check(up)
    if gate is not None and gate.shape != up.shape:
        raise ConfigError(f"gate has shape {tuple(gate.shape)}, up {tuple(up.shape)}; they must be equal")
    if x.shape[-1:] != up.shape[1:]:
        raise ConfigError(f"x has shape {tuple(x.shape)}; up takes (..., {up.shape[1]})")
    _check_activation(activation)


def _check_totals(totals: torch.Tensor, device: torch.device) -> None:
    """Kernels add to all of them, wherever they lie."""
    fits = totals.shape == (TOTALS,) and totals.dtype is torch.int32 and totals.is_contiguous()
    if not fits or totals.device != device:
        raise ConfigError(
            f"totals are {totals.dtype} {tuple(totals.shape)} on {totals.device}; they must be contiguous int32 "
            f"({TOTALS},) on {device}"
        )


def pad_weights(matrix: torch.Tensor) -> torch.Tensor:
    """Return an (intermediate, hidden) matrix with zeros up to what the kernels take; itself if nothing is missing."""
    inner, hidden = matrix.shape
    missing = (0, -hidden % HIDDEN_MULTIPLE, 0, -inner % INNER_MULTIPLE)
    return F.pad(matrix, missing) if any(missing) else matrix.contiguous()


def pad_columns(x: torch.Tensor, columns: int) -> torch.Tensor:
    """Return x with zeros up to so many columns; itself if it has them."""
    return F.pad(x, (0, columns - x.shape[-1])) if x.shape[-1] < columns else x.contiguous()


def _measure(values: torch.Tensor, measured: torch.Tensor) -> None:
    tile_columns = len(measured) - TwellStatistics.numbers(values.shape[1], 0)
    measured.copy_(TwellStatistics.measure(values > 0, tile_columns))


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x.float(), weight.float())
