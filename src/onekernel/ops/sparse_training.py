"""A ReLU feed-forward that is trained: forward and backward that touch active neurons only, as operators of PyTorch.

What is kept for the backward is x, a bit per neuron and token, and one product of the neurons that are multiplied
densely because they are hot. The backward reads the weights of active neurons in any case, so it makes their values
again: nothing has a capacity, nothing can overflow, and every sparsity from 0 to 100 % is exact. Sums are float32 in a
fixed order: two runs give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onekernel.errors import ConfigError
from onekernel.kernels.sparse_ffn import Activation
from onekernel.ops import training_formulas as formulas
from onekernel.ops.sparsity_stats import LayerSparsity, Sparsity, SparsityStats
from onekernel.ops.training_formulas import Gradients, Weights
from onekernel.ops.training_gpu import backward_on_gpu, count_on_gpu, forward_on_gpu, hot_backward_on_gpu, hot_columns
from onekernel.ops.training_route import TrainingRoute, TrainingRouteName, choose_route

__all__ = [
    "LayerSparsity",
    "SparseFFN",
    "Sparsity",
    "SparsityStats",
    "Trained",
    "TrainingRoute",
    "choose_route",
    "l1_loss",
    "train_ffn",
]


class Trained(NamedTuple):
    """What a feed-forward gives in training."""

    out: Tensor
    """As x, in its dtype."""
    penalty: Tensor
    """Scalar with a gradient: sum over neurons of |h|, mean over tokens; h = activate(gate) * up. float32."""
    row_counts: Tensor
    """(tokens,) int32: active neurons of each token."""
    neuron_counts: Tensor | None
    """(intermediate,) int64: tokens that each neuron was active for, if they were asked for."""


def train_ffn(
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    *,
    activation: Activation = "relu",
    route: TrainingRoute | TrainingRouteName | None = None,
    count_neurons: bool = False,
) -> Trained:
    """Return the feed-forward of x, (..., hidden), with what the L1 term and the log need; all of it differentiable.

    gate, up: (intermediate, hidden), down: (hidden, intermediate), as nn.Linear has them; None for one without a gate.
    They may be float32 beside a bf16 x (or under autocast): the arithmetic is x's, and their gradients are float32 sums
    that were never rounded. `route`: one, or its name; None is dense, which PyTorch does; sparse takes bf16 on a GPU
    and any dtype on a CPU, where plain PyTorch does it. Raises ConfigError for what does not fit.
    """
    route = TrainingRoute(route) if isinstance(route, str) else route or TrainingRoute()
    _check(x, gate, up, down, activation, route)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    rows = x.reshape(-1, x.shape[-1])
    with torch.autocast(x.device.type, enabled=False):
        if route.name == "dense":
            trained = _dense(rows, gate, up, down, activation, count_neurons)
        else:
            trained = _sparse(rows, gate, up, down, activation, route.hot, count_neurons)
    out, penalty, row_counts, neuron_counts = trained
    return Trained(out.view(x.shape), penalty, row_counts, neuron_counts)


def l1_loss(penalties: Sequence[Tensor], coefficient: float) -> Tensor:
    """Return the published L1 term (arXiv 2603.23198, as its code has it): coefficient * mean over layers."""
    return coefficient * torch.stack(list(penalties)).mean()


class SparseFFN(nn.Module):
    """down(activate(gate(x)) * up(x)) with weights that learn, under the names of a Llama's; see `train_ffn`.

    `route` says how, and whoever trains sets it between steps, from what `SparsityStats` read (`choose_route`): so it
    never differs between a forward and the one that activation checkpointing makes again, nor between two runs.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, activation: Activation = "relu", gated: bool = True
    ) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False) if gated else None
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.route = TrainingRoute()
        self.count_neurons = False

    def forward(self, x: Tensor) -> Trained:
        """Return the feed-forward of x, (..., hidden), with its penalty and counts."""
        gate = None if self.gate_proj is None else self.gate_proj.weight
        return train_ffn(
            x,
            gate,
            self.up_proj.weight,
            self.down_proj.weight,
            activation=self.activation,
            route=self.route,
            count_neurons=self.count_neurons,
        )


def _dense(
    x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, activation: Activation, count_neurons: bool
) -> Trained:
    first = F.linear(x, (up if gate is None else gate).to(x.dtype))
    inner = formulas.activate(first, activation == "relu2")
    if gate is not None:
        inner = inner * F.linear(x, up.to(x.dtype))
    penalty = inner.to(formulas.penalty_dtype(x)).abs().sum(1).sum() / max(len(x), 1)  # by rows first, as the counts
    active = first.detach() > 0
    return Trained(
        F.linear(inner, down.to(x.dtype)),
        penalty,
        active.sum(1, dtype=torch.int32),
        active.sum(0) if count_neurons else None,
    )


def _sparse(
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    activation: Activation,
    hot: Tensor | None,
    count_neurons: bool,
) -> Trained:
    if hot is None:
        hot = torch.empty(0, dtype=torch.int64, device=x.device)
    out, total, masks, row_counts, hot_first = _forward(x, gate, up, down, hot, activation)
    counts = None
    if count_neurons:
        counts = _neuron_counts(masks, len(up)).index_add(0, hot, (hot_first[:, : len(hot)] > 0).sum(0))
    return Trained(out, total / max(len(x), 1), row_counts, counts)


@torch.library.custom_op("onekernel::train_ffn", mutates_args=())
def _forward(
    x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, hot: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return out, the sum of |h|, masks without hot neurons, active by token, and the first product of the hot."""
    square, weights = activation == "relu2", _prepared(x, gate, up, down)
    if x.is_cuda:
        out, total, masks, counts, kept = forward_on_gpu(x, weights, hot, square)
        return out, total, masks, counts, kept
    first, product = formulas.products(x, weights)
    out, total = formulas.forward(x, weights, first, product, square)
    active = first > 0
    masks, counts = formulas.pack_bits(active.index_fill(1, hot, False)), active.sum(1, dtype=torch.int32)
    kept = F.pad(first[:, hot], (0, hot_columns(hot) - len(hot)))
    return out.to(x.dtype), total, masks, counts, kept


@_forward.register_fake
def _(
    x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, hot: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, neurons = len(x), len(up)
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty((), dtype=formulas.penalty_dtype(x)),
        x.new_empty(tokens, -(-neurons // formulas.WORD), dtype=torch.int32),
        x.new_empty(tokens, dtype=torch.int32),
        x.new_empty(tokens, hot_columns(hot)),
    )


@torch.library.custom_op("onekernel::train_ffn_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    grad_total: Tensor,
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    masks: Tensor,
    hot: Tensor,
    hot_first: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, gate (empty if there is none), up and down."""
    with torch.autocast(x.device.type, enabled=False):  # a backward may be called inside of it
        grad_out = grad_out.contiguous()
        found = _gradients(grad_out, grad_total, x, gate, up, down, masks, hot, hot_first, activation == "relu2")
        grad_gate = up.new_empty(0) if found.gate is None else found.gate.to(up.dtype).contiguous()
        grad_up, grad_down = found.up.to(up.dtype).contiguous(), found.down_rows.t().to(up.dtype).contiguous()
        return found.x.to(x.dtype), grad_gate, grad_up, grad_down


@_backward.register_fake
def _(
    grad_out: Tensor,
    grad_total: Tensor,
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    masks: Tensor,
    hot: Tensor,
    hot_first: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = [up.new_empty(0) if weight is None else weight.new_empty(weight.shape) for weight in (gate, up, down)]
    return torch.empty_like(x, memory_format=torch.contiguous_format), made[0], made[1], made[2]


def _gradients(
    grad_out: Tensor,
    grad_total: Tensor,
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    masks: Tensor,
    hot: Tensor,
    hot_first: Tensor,
    square: bool,
) -> Gradients:
    """Return the gradients by neurons: on a GPU of the hot ones first, before the down projection is turned around."""
    if not x.is_cuda:
        weights = _prepared(x, gate, up, down)
        active = formulas.unpack_bits(masks, len(up)).index_copy(1, hot, hot_first[:, : len(hot)] > 0)
        return formulas.backward(grad_out, grad_total, x, weights, *formulas.products(x, weights), active, square)
    dense: Gradients | None = None
    if len(hot):
        chosen = _picked(x, gate, up, down, hot)
        dense = hot_backward_on_gpu(grad_out, grad_total, x, chosen, hot_first, square, up.dtype)
        del chosen
    base = None if dense is None else dense.x
    found = backward_on_gpu(grad_out, grad_total, x, _prepared(x, gate, up, down), masks, base, square, up.dtype)
    if dense is not None:
        for whole, part in zip(found[1:], dense[1:], strict=True):
            if whole is not None and part is not None:
                whole.index_copy_(0, hot, part)
    return found


@torch.library.custom_op("onekernel::neuron_counts", mutates_args=())
def _neuron_counts(masks: Tensor, neurons: int) -> Tensor:
    """Return by neuron the tokens whose bit is set, (neurons,) int64."""
    if masks.is_cuda:
        return count_on_gpu(masks, neurons)
    return formulas.unpack_bits(masks, neurons).sum(0)


@_neuron_counts.register_fake
def _(masks: Tensor, neurons: int) -> Tensor:
    return masks.new_empty(neurons, dtype=torch.int64)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.activation = inputs
    _, _, masks, row_counts, hot_first = output
    ctx.mark_non_differentiable(masks, row_counts, hot_first)
    ctx.save_for_backward(*tensors, masks, hot_first)


def _differentiate(ctx: Any, grad_out: Tensor, grad_total: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, gate, up, down, hot, masks, hot_first = ctx.saved_tensors
    grads = _backward(grad_out, grad_total, x, gate, up, down, masks, hot, hot_first, ctx.activation)
    return grads[0], None if gate is None else grads[1], grads[2], grads[3], None, None


_forward.register_autograd(_differentiate, setup_context=_keep)


def _prepared(x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor) -> Weights:
    """Return the weights as the arithmetic wants them: x's dtype, the down projection by neurons."""
    return Weights(None if gate is None else gate.to(x.dtype), up.to(x.dtype), down.t().to(x.dtype).contiguous())


def _picked(x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, hot: Tensor) -> Weights:
    """Return the weights of some neurons alone, as `_prepared` has them."""
    down_rows = down.index_select(1, hot).t().to(x.dtype).contiguous()
    return Weights(None if gate is None else gate[hot].to(x.dtype), up[hot].to(x.dtype), down_rows)


def _check(x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, activation: str, route: TrainingRoute) -> None:
    if activation not in ("relu", "relu2"):
        raise ConfigError(f"activation is {activation!r}; it must be relu or relu2, whose values can be zero")
    if x.dim() == 0 or x.shape[-1:] != up.shape[1:] or up.dim() != 2:
        raise ConfigError(f"x has shape {tuple(x.shape)}, up {tuple(up.shape)}; up takes (..., {up.shape[-1]})")
    if gate is not None and gate.shape != up.shape:
        raise ConfigError(f"gate has shape {tuple(gate.shape)}, up {tuple(up.shape)}; they must be equal")
    if down.shape != up.shape[::-1]:
        raise ConfigError(
            f"down has shape {tuple(down.shape)}; beside up of {tuple(up.shape)} it must be {tuple(up.shape[::-1])}"
        )
    dtypes = {str(weight.dtype) for weight in (gate, up, down) if weight is not None}
    if len(dtypes) > 1:
        raise ConfigError(f"the weights are {', '.join(sorted(dtypes))}; they must have one dtype")
    if route.hot is not None and route.hot.device != x.device:
        raise ConfigError(f"the hot neurons are on {route.hot.device}, x on {x.device}; move them there once")
