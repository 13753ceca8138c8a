"""One feed-forward, forward and backward, beside PyTorch's: the rows `ffn_step` of training.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.ledger import Job
from benchmarks.sparse_layer import Layer, dense
from benchmarks.sparse_patterns import skew
from benchmarks.sparse_timing import error, finish, interleaved, per_token
from benchmarks.training_scale import L1, Scale, milliseconds
from onekernel.ops.sparse_training import SparsityStats, TrainingRoute, choose_route, train_ffn
from onekernel.ops.training_route import TrainingCosts


def ffn_jobs(scale: Scale, counter: Callable[[], float] | None) -> Iterator[Job]:
    """Yield a measurement for every share of nonzeros, skewed."""

    def of(fraction: float) -> dict[str, Any]:
        torch.compiler.reset()  # a way of its own for every pattern would reach the limit of recompilations
        layer = Layer.of(skew(fraction, 0, scale.tokens, scale.inner), scale.hidden, scale.device)
        about = {"kind": "ffn_step", "pattern": "skew", "asked_fraction": fraction}
        return about | compare(scale, layer, counter)

    for fraction in scale.fractions:
        yield f"a feed-forward, {fraction}", partial(of, fraction)


def compare(scale: Scale, layer: Layer, counter: Callable[[], float] | None) -> dict[str, Any]:
    """Return times, memory, errors and energy of a step, ours by the way that its counts suggest.

    While memory is looked at, nothing is there but the step's own: x, the weights, and the gradient of the output.
    """
    route, fraction = chosen(layer, scale.costs)
    draw = torch.Generator(scale.device).manual_seed(2)
    grad_out = torch.randn(layer.x.shape, generator=draw, device=scale.device).to(layer.x.dtype)
    leaves = [part.requires_grad_() for part in (layer.x, layer.gate, layer.up, layer.down)]
    penalty_grad = torch.tensor(L1, device=scale.device)

    def ours(*parts: Tensor) -> tuple[Tensor, Tensor]:
        trained = train_ffn(*parts, route=route)
        return trained.out, trained.penalty

    def plain(*parts: Tensor) -> tuple[Tensor]:
        return (dense(*parts),)

    ways = {"ours": scale.compiled(ours), "eager": plain, "compiled": scale.compiled(plain)}
    grads = [grad_out, penalty_grad]

    def step(way: str) -> Callable[[], None]:
        return lambda: run_step(ways[way], leaves, grads)

    steps = {way: step(way) for way in ways}
    us = interleaved(steps, scale.repeats, scale.device)
    best = min(("eager", "compiled"), key=lambda way: us[way]["median"])
    peaks = {way: peak_mb(steps[way], scale.device) for way in ("ours", best)}
    floats = [leaf.detach().float() for leaf in leaves]
    want = gradients(lambda *parts: (dense(*parts),), floats, [grad_out.float()])
    return {
        "hidden_size": layer.x.shape[1],
        "intermediate_size": len(layer.gate),
        "tokens": len(layer.x),
        "nonzero_fraction": fraction,
        "route": route.name,
        "hot_neurons": 0 if route.hot is None else len(route.hot),
        "ms": milliseconds(us["ours"]),
        "dense_ms": milliseconds(us[best]),
        "dense": best,
        "speedup": us[best]["median"] / us["ours"]["median"],
        "peak_mb": peaks["ours"],
        "dense_peak_mb": peaks[best],
        "relative_error": worst(gradients(ways["ours"], leaves, grads), want),
        "dense_relative_error": worst(gradients(ways[best], leaves, grads), want),
        "mj_per_token": per_token(scale, counter, steps["ours"], us["ours"]["median"], len(layer.x)),
        "dense_mj_per_token": per_token(scale, counter, steps[best], us[best]["median"], len(layer.x)),
    }


def chosen(layer: Layer, costs: TrainingCosts) -> tuple[TrainingRoute, float]:
    """Return the way that a layer's own counts suggest, and its share of nonzeros."""
    stats = SparsityStats(1, len(layer.gate), layer.x.device)
    with torch.no_grad():
        seen = train_ffn(layer.x, layer.gate, layer.up, layer.down, count_neurons=True)
    if seen.neuron_counts is not None:
        stats.observe(0, seen.row_counts, seen.neuron_counts)
    found = stats.read().layers[0]
    route = choose_route(found, len(layer.x), layer.x.shape[1], costs=costs)
    if route.hot is not None:
        route = TrainingRoute(route.name, route.hot.to(layer.x.device))
    return route, found.nonzero_fraction


def run_step(way: Callable[..., Sequence[Tensor]], leaves: list[Tensor], grads: list[Tensor]) -> None:
    """Forward and backward, into new gradients."""
    for leaf in leaves:
        leaf.grad = None
    sum(Given.apply(out, grad) for out, grad in zip(way(*leaves), grads, strict=False)).backward()


class Given(torch.autograd.Function):
    """A scalar whose gradient is the given one: the output itself need not stay, as nobody keeps it in a network."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return out.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.grad, None


def gradients(way: Callable[..., Sequence[Tensor]], leaves: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Return a way's output and the gradients of x and the weights."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    outputs = way(*leaves)
    torch.autograd.backward(outputs, grads[: len(outputs)])
    return [outputs[0].detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def worst(got: list[Tensor], want: list[Tensor]) -> float:
    """Return the largest relative L2 error among them."""
    return max(error(one, other) for one, other in zip(got, want, strict=True))


def peak_mb(step: Callable[[], object], device: str) -> float | None:
    """Return the most memory that a step has, weights and inputs included; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    step()
    finish(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    finish(device)
    return torch.cuda.max_memory_allocated(device) / 1e6
