"""Whole training steps of the published shapes, sparse beside dense: the rows `model_step` of training.py."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.ledger import Job
from benchmarks.sparse_llama import ReluFFN, Sizes, SparseLlama
from benchmarks.sparse_models import patterned_model
from benchmarks.sparse_patterns import skew
from benchmarks.sparse_timing import finish, per_token, time_us
from benchmarks.training_ffn import peak_mb
from benchmarks.training_scale import L1, Scale, allow_versions, milliseconds
from onekernel.measure.results import spread
from onekernel.ops.sparse_training import SparseFFN, Sparsity, SparsityStats, TrainingRoute, choose_route, l1_loss
from onekernel.ops.training_route import TrainingCosts


class Trainable(nn.Module):
    """A `SparseFFN` with another feed-forward's weights, in its place; keeps what the loss and the counts need."""

    def __init__(self, ffn: ReluFFN) -> None:
        super().__init__()
        inner, hidden = ffn.up_proj.weight.shape
        with torch.device("meta"):
            self.ffn = SparseFFN(hidden, inner)
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(self.ffn, name, getattr(ffn, name))
        self.penalty = torch.zeros(())
        self.counts: tuple[Tensor, Tensor | None] = (torch.zeros(0), None)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output alone, as the feed-forward whose place it has."""
        found = self.ffn(x)
        self.penalty, self.counts = found.penalty, (found.row_counts, found.neuron_counts)
        return found.out


class Step:
    """A step of training that leaves the weights as they are, or the pattern would change: the learning rate is 0."""

    def __init__(self, model: SparseLlama, ids: Tensor, scale: Scale) -> None:
        self._model, self._ids, self._device = model, ids, scale.device
        fused = scale.device.startswith("cuda")
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=fused)
        if fused:
            for layer in model.layers:
                layer.compile()

    def __call__(self) -> None:
        """Forward, loss, backward, clipping and AdamW."""
        loss, penalty = self.losses()
        (loss + penalty).backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def losses(self) -> tuple[Tensor, Tensor]:
        """Return the cross entropy, and the L1 term where feed-forwards have one."""
        with torch.autocast(self._device.partition(":")[0], torch.bfloat16):
            logits = self._model.logits(self._ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), self._ids[:, 1:].flatten())
        penalties = [layer.mlp.penalty for layer in self._model.layers if isinstance(layer.mlp, Trainable)]
        return loss, l1_loss(penalties, L1) if penalties else torch.zeros_like(loss)


def model_jobs(scale: Scale, counter: Callable[[], float] | None) -> Iterator[Job]:
    """Yield a measurement for every model and share of nonzeros."""

    def of(name: str, sizes: Sizes, fraction: float) -> dict[str, Any]:
        torch.compiler.reset()
        about = {"kind": "model_step", "model": name, "asked_fraction": fraction}
        return about | model_row(scale, sizes, fraction, counter)

    for name, sizes in scale.models.items():
        for fraction in scale.model_fractions:
            yield f"the {name} model, {fraction}", partial(of, name, sizes, fraction)


def model_row(scale: Scale, sizes: Sizes, fraction: float, counter: Callable[[], float] | None) -> dict[str, Any]:
    """Return times, memory, losses and energy of a step: the same weights and micro-batch, dense and then sparse."""
    allow_versions(scale.device)
    pattern = skew(fraction, 0, sizes.vocab, sizes.inner)
    model = patterned_model(sizes, pattern, scale.device).float()
    for parameter in model.parameters():
        parameter.requires_grad_()
    batch, length = scale.batch
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, sizes.vocab, (batch, length + 1), generator=draw).to(scale.device)
    dense = measured(scale, Step(model, ids, scale), counter, batch * length)
    for layer in model.layers:
        layer.mlp = Trainable(layer.mlp)
    seen = take_routes(model, Step(model, ids, scale), batch * length, scale.costs)
    torch.compiler.reset()  # what was compiled for counting has served
    gc.collect()  # or the dense side's optimizer might count as ours
    ours = measured(scale, Step(model, ids, scale), counter, batch * length)
    routes = [layer.mlp.ffn.route for layer in model.layers]
    return {
        "pattern": "skew",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "tokens": batch * length,
        "nonzero_fraction": seen.nonzero_fraction,
        "sparse_layers": sum(route.name == "sparse" for route in routes),
        "hot_neurons": statistics.mean(0 if route.hot is None else len(route.hot) for route in routes),
        **ours,
        **{f"dense_{name}": value for name, value in dense.items()},
        "speedup": dense["ms"]["median"] / ours["ms"]["median"],
        "relative_error": abs(ours["cross_entropy"] - dense["cross_entropy"]) / abs(dense["cross_entropy"]),
    }


def measured(scale: Scale, step: Step, counter: Callable[[], float] | None, tokens: int) -> dict[str, Any]:
    """Return what both sides of the comparison have."""
    for _ in range(3):
        step()
    finish(scale.device)
    us = spread([time_us(step, scale.device) for _ in range(max(scale.repeats * 2 // 3, 2))])
    with torch.no_grad():
        loss = float(step.losses()[0])
    return {
        "ms": milliseconds(us),
        "peak_mb": peak_mb(step, scale.device),
        "mj_per_token": per_token(scale, counter, step, us["median"], tokens),
        "cross_entropy": loss,
    }


def take_routes(model: SparseLlama, step: Step, tokens: int, costs: TrainingCosts) -> Sparsity:
    """Count one step, and give every layer the way that its counts suggest."""
    feeds: list[Trainable] = [layer.mlp for layer in model.layers]
    stats = SparsityStats(len(feeds), feeds[0].ffn.up_proj.out_features, feeds[0].ffn.up_proj.weight.device)
    for feed in feeds:
        feed.ffn.count_neurons = True
    with torch.no_grad():
        step.losses()
    for index, feed in enumerate(feeds):
        rows, neurons = feed.counts
        if neurons is not None:
            stats.observe(index, rows, neurons)
        feed.ffn.count_neurons = False
    seen = stats.read()
    for feed, layer in zip(feeds, seen.layers, strict=True):
        route = choose_route(layer, tokens, feed.ffn.up_proj.in_features, costs=costs)
        hot = None if route.hot is None else route.hot.to(feed.ffn.up_proj.weight.device)
        feed.ffn.route = TrainingRoute(route.name, hot)
    return seen
