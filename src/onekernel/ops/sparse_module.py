"""The sparse feed-forward as an nn.Module, and in the place of a transformers model's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from onekernel.errors import ConfigError
from onekernel.kernels.sparse_ffn import TOTALS, Activation, SparseShape
from onekernel.ops.sparse import pad_columns, pad_weights, run, shared_bytes
from onekernel.ops.sparse_route import Route
from onekernel.ops.sparse_router import Measured, Router
from onekernel.weights.neuron_rows import DownProjection

_ACTIVATIONS: dict[str, Activation] = {
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
    "relu": "relu",
    "relu2": "relu2",
}
"""Classes and config names of transformers and PyTorch."""


class SparseFFN(torch.nn.Module):
    """down(activate(gate(x)) * up(x)), by the way that earlier calls showed to be fastest; for inference.

    gate, up: (intermediate, hidden), None for a feed-forward without a gate. The weights are buffers, padded once where
    the kernels want it. The first call is dense and measured, and the order of the neurons may then change, which
    changes no result: the weights are copies. `route` fixes the way, and the given weights are kept where nothing needs
    padding. Every way is exact.
    """

    gate: torch.Tensor | None
    up: torch.Tensor
    down_rows: torch.Tensor
    totals: torch.Tensor

    def __init__(
        self,
        gate: torch.Tensor | None,
        up: torch.Tensor,
        down: DownProjection,
        *,
        activation: Activation = "relu",
        route: Route | None = None,
    ) -> None:
        super().__init__()
        down.check(up)
        self.hidden_size = up.shape[1]
        self.activation: Activation = activation
        reordered = route is None
        self.register_buffer("gate", None if gate is None else _padded(gate, reordered))
        self.register_buffer("up", _padded(up, reordered))
        self.register_buffer("down_rows", _padded(down.rows, reordered))
        self.register_buffer("totals", torch.zeros(TOTALS, dtype=torch.int32, device=up.device), persistent=False)
        inner, hidden = self.up.shape
        shape = SparseShape(gated=gate is not None, activation=activation)
        self.router = Router(shape, hidden, inner, forced=route, shared_bytes=shared_bytes(self.up.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the feed-forward of x, (..., hidden), in x's dtype."""
        rows = pad_columns(x.reshape(-1, self.hidden_size), self.up.shape[1])
        out: torch.Tensor = self._run(rows) if len(rows) else rows
        return out[:, : self.hidden_size].reshape(x.shape)

    @property
    def measured(self) -> Measured | None:
        """What was seen so far, without waiting; None before the first measurement has arrived."""
        return self.router.measured

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
    def _run(self, rows: torch.Tensor) -> torch.Tensor:
        frozen = rows.is_cuda and torch.cuda.is_current_stream_capturing()
        route = self.router.next(len(rows), frozen=frozen)
        measured = None
        if not frozen:
            if (order := self.router.take_order()) is not None:
                self._reorder(order.to(rows.device))
            measured = self.router.measurement(rows.device)
        out = run(rows, self.gate, self.up, self.down_rows, self.totals, measured, self.activation, route)
        if not frozen:
            self.router.sent(len(rows), self.totals, measured)
        return out

    @torch.no_grad()
    def _reorder(self, order: torch.Tensor) -> None:
        """Put the neurons into another order, in place: graphs keep their pointers."""
        for matrix in (self.gate, self.up, self.down_rows):
            if matrix is not None:
                matrix.copy_(matrix[order])


def _padded(matrix: torch.Tensor, own: bool) -> torch.Tensor:
    padded = pad_weights(matrix.detach())
    return padded.clone() if own and padded.data_ptr() == matrix.data_ptr() else padded


@dataclass(frozen=True, slots=True)
class LayerMeasured:
    """What was seen in one layer; `measured` is None before its first measurement has arrived."""

    name: str
    measured: Measured | None


@dataclass(frozen=True, slots=True)
class Replaced:
    """The feed-forwards that `replace_ffn` put into a model, by the name of the module."""

    layers: dict[str, SparseFFN]

    def report(self) -> list[LayerMeasured]:
        """Return what every layer was seen to do, and the way it takes now; nothing waits."""
        return [LayerMeasured(name, layer.measured) for name, layer in self.layers.items()]


def replace_ffn(
    model: torch.nn.Module, *, activation: Activation | None = None, route: Route | None = None
) -> Replaced:
    """Put a `SparseFFN` in the place of every feed-forward of a transformers Llama or Qwen; nothing else changes.

    A feed-forward is a module with gate_proj, up_proj, down_proj and act_fn; one of several names stays one. The old
    ones are not changed: their weights are copied, one feed-forward at a time. With a `route` only the down projections
    are, which are transposed. `activation` says what the weights were trained with where the config says
    something else: published sparse checkpoints say silu. Raises ConfigError, before anything is changed, if there is
    no feed-forward, one has biases or no ReLU, or `activation` is none.
    """
    if activation not in (None, "relu", "relu2"):
        raise ConfigError(f"activation is {activation!r}; it must be relu or relu2, whose values can be zero")
    found: dict[torch.nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if _is_ffn(module):
            found.setdefault(module, []).append(name)
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no module with gate_proj, up_proj, down_proj and act_fn, or all are replaced "
            f"already; replace_ffn knows the feed-forwards of transformers' Llama and Qwen"
        )
    kinds = [activation or _activation(names[0], module) for module, names in found.items()]
    for module, names in found.items():
        _refuse_biases(names[0], module)
    layers: dict[str, SparseFFN] = {}
    for kind in kinds:
        module = next(iter(found))
        names = found.pop(module)  # nothing here keeps the old weights in memory while the next are copied
        layer = _made(module, kind, route)
        for name in names:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, layer)
            layers[name] = layer
    return Replaced(layers)


def _made(module: Any, activation: Activation, route: Route | None) -> SparseFFN:
    down = DownProjection.from_linear(module.down_proj.weight.detach())
    gate, up = module.gate_proj.weight, module.up_proj.weight
    return SparseFFN(gate, up, down, activation=activation, route=route).train(module.training)


def _is_ffn(module: torch.nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn"))


def _activation(name: str, module: Any) -> Activation:
    act: torch.nn.Module | Callable[..., Any] = module.act_fn
    kind = type(act).__name__ if isinstance(act, torch.nn.Module) else getattr(act, "__name__", repr(act))
    if kind not in _ACTIVATIONS:
        raise ConfigError(
            f"{name} has the activation {kind}, whose values are never zero; if the weights were trained with ReLU "
            f'(published sparse checkpoints were, though their config says silu), give activation="relu"'
        )
    return _ACTIVATIONS[kind]


def _refuse_biases(name: str, module: Any) -> None:
    for part in ("gate_proj", "up_proj", "down_proj"):
        if getattr(module, part).bias is not None:
            raise ConfigError(f"{name}.{part} has a bias; sparse feed-forwards with biases are not built in")
