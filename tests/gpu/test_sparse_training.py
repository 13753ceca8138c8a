"""Sparse training on a real GPU: float32's gradients on every route, compiled too, the same bits every time."""

from __future__ import annotations

import pytest
import torch

from benchmarks.sparse_layer import Layer, dense
from benchmarks.sparse_patterns import iid, skew
from benchmarks.training_ffn import gradients, worst
from onekernel.ops.sparse_training import TrainingRoute, train_ffn

pytestmark = pytest.mark.timeout(200)

GPU = "cuda:0"
HOT = 512


def route_of(name: str, layer: Layer) -> TrainingRoute:
    if name != "hot":
        return TrainingRoute(name)  # type: ignore[arg-type]
    rates = torch.nn.functional.linear(layer.x, layer.gate).gt(0).sum(0)
    return TrainingRoute("sparse", rates.argsort(descending=True)[: min(HOT, len(rates) // 4)])


def leaves_of(layer: Layer) -> list[torch.Tensor]:
    return [layer.x, layer.gate, layer.up, layer.down]


def grads_of(layer: Layer) -> list[torch.Tensor]:
    draw = torch.Generator(GPU).manual_seed(3)
    return [torch.randn(layer.x.shape, generator=draw, device=GPU), torch.tensor(0.0, device=GPU)]


def run(layer: Layer, route: TrainingRoute, **more) -> list[torch.Tensor]:
    grad_out, penalty = grads_of(layer)

    def way(*parts: torch.Tensor):
        found = train_ffn(*parts, route=route, **more)
        return found.out, found.penalty

    return gradients(way, leaves_of(layer), [grad_out.bfloat16(), penalty])


def exact(layer: Layer) -> list[torch.Tensor]:
    leaves = [leaf.float() for leaf in leaves_of(layer)]
    return gradients(lambda *parts: (dense(*parts),), leaves, grads_of(layer)[:1])


@pytest.mark.parametrize("name", ["dense", "sparse", "hot"])
@pytest.mark.parametrize("fraction", [0.005, 0.02, 0.5])
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(2048, 2048, 5632), (513, 1000, 3001), (1, 576, 1536)])
def test_gradients_are_float32s(name: str, fraction: float, tokens: int, hidden: int, inner: int) -> None:
    layer = Layer.of(skew(fraction, 0, tokens, inner), hidden, GPU)
    plain = gradients(lambda *parts: (dense(*parts),), leaves_of(layer), [grads_of(layer)[0].bfloat16()])
    want = exact(layer)
    assert worst(run(layer, route_of(name, layer)), want) < 1.3 * worst(plain, want) + 1e-3


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_nothing_and_everything_active(fraction: float) -> None:
    layer = Layer.of(iid(0.5, 256, 1024), 512, GPU)
    layer.gate[:, -2] = 100.0 if fraction else -100.0
    found = run(layer, TrainingRoute("sparse"))
    if fraction:
        assert worst(found, exact(layer)) < 0.01
    else:
        assert all(not tensor.any() for tensor in found)


@pytest.mark.parametrize("name", ["sparse", "hot"])
def test_the_same_bits_every_time(name: str) -> None:
    layer = Layer.of(skew(0.01, 0, 4096, 5632), 2048, GPU)
    route = route_of(name, layer)
    first = run(layer, route)
    for _ in range(3):
        assert all(torch.equal(one, other) for one, other in zip(run(layer, route), first, strict=True))


def test_counts_and_penalty() -> None:
    layer = Layer.of(skew(0.01, 0, 4096, 5632), 2048, GPU)
    plain = train_ffn(*leaves_of(layer), count_neurons=True)
    for name in ("sparse", "hot"):
        found = train_ffn(*leaves_of(layer), route=route_of(name, layer), count_neurons=True)
        assert (found.row_counts - plain.row_counts).abs().sum() <= 4  # products of other shapes round differently
        assert (found.neuron_counts - plain.neuron_counts).abs().sum() <= 4
        torch.testing.assert_close(found.penalty, plain.penalty, rtol=1e-3, atol=0.0)


def test_float32_weights_get_float32_gradients_under_autocast() -> None:
    layer = Layer.of(skew(0.01, 0, 1024, 5632), 2048, GPU)
    leaves = [leaf.float() for leaf in leaves_of(layer)]

    def way(*parts: torch.Tensor):
        with torch.autocast("cuda", torch.bfloat16):
            found = train_ffn(*parts, route=TrainingRoute("sparse"))
        return found.out, found.penalty

    grad_out, penalty = grads_of(layer)
    found = gradients(way, leaves, [grad_out.bfloat16(), penalty])
    assert all(grad.dtype is torch.float32 for grad in found[1:])
    assert worst(found, exact(layer)) < 0.01


def test_it_compiles_and_never_waits() -> None:
    layer = Layer.of(skew(0.01, 0, 1024, 5632), 2048, GPU)
    route = route_of("hot", layer)
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves_of(layer)]
    grad_out = grads_of(layer)[0].bfloat16()

    @torch.compile(fullgraph=True)
    def compiled(*parts: torch.Tensor) -> torch.Tensor:
        return train_ffn(*parts, route=route).out

    want = run(layer, route)
    for _ in range(3):
        compiled(*leaves).backward(grad_out)
    torch.cuda.synchronize()
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.set_sync_debug_mode("error")
    try:
        compiled(*leaves).backward(grad_out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert worst([leaf.grad for leaf in leaves], want[1:]) < 1e-3


def test_more_tokens_than_16_bits() -> None:
    layer = Layer.of(skew(0.002, 0, 70_000, 1024), 256, GPU)
    assert worst(run(layer, TrainingRoute("sparse")), exact(layer)) < 0.01
