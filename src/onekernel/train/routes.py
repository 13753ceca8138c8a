"""How each layer's feed-forward is computed: chosen now and then from what was counted, kept with the checkpoint.

Every way is exact, but their sums have other orders. So processes share the choice, and a resumed run goes on with the
one it had: its losses are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from onekernel.ops.sparse_training import LayerSparsity, Sparsity, TrainingRoute, choose_route
from onekernel.ops.training_gpu import takes_hidden
from onekernel.train.model import SparseLlama
from onekernel.train.settings import Settings
from onekernel.train.world import World

HOT = "hot:"
"""Begins the names of these tensors in a checkpoint."""


def shared(seen: Sparsity, world: World) -> Sparsity:
    """Return what all processes counted together; every process must call it."""
    if world.size == 1:
        return seen
    layers = seen.layers
    sums = [torch.cat([torch.tensor([s.tokens, round(s.mean * s.tokens)]), s.neuron_counts]) for s in layers]
    total = world.total(torch.stack(sums).to(world.device)).cpu()
    fullest = world.largest(torch.tensor([s.fullest for s in layers], device=world.device)).tolist()
    return Sparsity(
        tuple(
            LayerSparsity(int(row[0]), int(row[1]) / max(int(row[0]), 1), most, row[2:])
            for row, most in zip(total, fullest, strict=True)
        )
    )


def choose_routes(model: SparseLlama, seen: Sparsity, settings: Settings, world: World) -> None:
    """Set every layer's way for the next steps: what `sparsity.route` says, or the fastest for what was seen."""
    run, asked = settings.run, settings.sparsity.route
    tokens = (run.micro_batch or run.batch // world.size) * settings.data.context
    for layer, counted in zip(model.layers, seen.layers, strict=True):
        if asked != "auto":
            layer.mlp.route = TrainingRoute(asked)
        elif _may_be_sparse(world) and takes_hidden(model.config.hidden_size, world.device):
            chosen = choose_route(counted, tokens, model.config.hidden_size)
            layer.mlp.route = _placed(chosen.name == "sparse", chosen.hot, world.device)


def first_routes(model: SparseLlama, settings: Settings, world: World, say: Callable[[str], None]) -> None:
    """Set every layer's way for the first steps, of which nothing is known: dense, unless sparse is forced.

    Says so if the way is chosen later and can only ever be dense, because the kernels do not take the model's size.
    """
    hidden = model.config.hidden_size
    if settings.sparsity.route == "auto" and _may_be_sparse(world) and not takes_hidden(hidden, world.device):
        say(f"every layer stays dense: hidden_size {hidden} is more than the sparse kernels take on this GPU")
    for layer in model.layers:
        layer.mlp.route = TrainingRoute("sparse" if settings.sparsity.route == "sparse" else "dense")


def route_tensors(model: SparseLlama) -> dict[str, Tensor]:
    """Return the ways as tensors of a checkpoint: the hot neurons of each layer that is computed sparsely."""
    none = torch.empty(0, dtype=torch.int64)
    return {
        f"{HOT}{number}": none if layer.mlp.route.hot is None else layer.mlp.route.hot.cpu()
        for number, layer in enumerate(model.layers)
        if layer.mlp.route.name == "sparse"
    }


def restore_routes(model: SparseLlama, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Set the ways that `route_tensors` returned."""
    for number, layer in enumerate(model.layers):
        name = f"{HOT}{number}"
        layer.mlp.route = _placed(name in tensors, tensors.get(name), device)


def _may_be_sparse(world: World) -> bool:
    """Whether the kernels are for this device and dtype."""
    return world.device.type == "cuda" and world.dtype is torch.bfloat16


def _placed(sparse: bool, hot: Tensor | None, device: torch.device) -> TrainingRoute:
    if not sparse:
        return TrainingRoute()
    return TrainingRoute("sparse", None if hot is None or hot.numel() == 0 else hot.to(device))
