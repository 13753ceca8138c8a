"""Sparsity is counted as it was, begins anew after a reading, and decides which way a layer is trained."""

from __future__ import annotations

import pytest
import torch

from onekernel.errors import ConfigError
from onekernel.ops.sparsity_stats import LayerSparsity, SparsityStats
from onekernel.ops.training_route import HOT_MULTIPLE, TrainingCosts, choose_route


def test_what_was_counted_is_read_once() -> None:
    torch.manual_seed(0)
    stats = SparsityStats(2, 40, "cpu")
    first, second = torch.rand(9, 40) < 0.1, torch.rand(5, 40) < 0.5
    first[:, 7] = second[:, 7] = False
    for active in (first, second):
        stats.observe(1, active.sum(1, dtype=torch.int32), active.sum(0))
    stats.observe(1, torch.zeros(0, dtype=torch.int32), torch.zeros(40, dtype=torch.int64))
    both = torch.cat([first, second])
    found = stats.read()
    layer = found.layers[1]
    assert (layer.tokens, layer.mean, layer.fullest) == (14, int(both.sum()) / 14, int(both.sum(1).max()))
    assert torch.equal(layer.neuron_counts, both.sum(0))
    assert layer.dead == int((both.sum(0) == 0).sum()) >= 1
    assert layer.nonzero_fraction == pytest.approx(float(both.double().mean()))
    assert (found.layers[0].tokens, found.layers[0].mean, found.layers[0].dead) == (0, 0.0, 40)
    assert (found.mean, found.fullest, found.dead) == (layer.mean / 2, layer.fullest, layer.dead + 40)
    assert found.nonzero_fraction == pytest.approx(layer.nonzero_fraction / 2)
    assert stats.read().layers[1].tokens == 0


def test_neurons_may_be_counted_in_some_calls_only() -> None:
    torch.manual_seed(0)
    stats = SparsityStats(1, 512, "cpu")
    active = torch.rand(64, 512) < 0.02
    stats.observe(0, active.sum(1, dtype=torch.int32), None)
    without = stats.read().layers[0]
    assert (without.tokens, without.mean, without.dead) == (64, int(active.sum()) / 64, 512)
    cheap = TrainingCosts(call_us=0.0, gathered_bytes_per_us=1e8)
    assert choose_route(without, 16384, 2048, costs=cheap).name == "dense"
    for _ in range(3):
        stats.observe(0, active.sum(1, dtype=torch.int32), None)
    stats.observe(0, active.sum(1, dtype=torch.int32), active.sum(0))
    some = stats.read().layers[0]
    stats.observe(0, active.sum(1, dtype=torch.int32), active.sum(0))
    every = stats.read().layers[0]
    assert (some.tokens, some.mean) == (4 * 64, every.mean)
    ways = [choose_route(layer, 16384, 2048, costs=cheap) for layer in (some, every)]
    assert [way.name for way in ways] == ["sparse", "sparse"]
    assert ways[0].hot is ways[1].hot is None


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 layers of 4 neurons; both must be 1 or more"):
        SparsityStats(0, 4, "cpu")


def seen(rates: torch.Tensor, tokens: int = 16384) -> LayerSparsity:
    counts = (rates * tokens).long()
    return LayerSparsity(tokens, float(counts.sum()) / max(tokens, 1), int(counts.max()), counts)


def test_many_nonzeros_go_densely_and_few_do_not() -> None:
    assert choose_route(seen(torch.full((5632,), 0.3)), 16384, 2048).name == "dense"
    few = choose_route(seen(torch.full((5632,), 0.003)), 16384, 2048)
    assert few.name == "sparse"
    assert few.hot is None
    assert choose_route(seen(torch.zeros(5632), tokens=0), 16384, 2048).name == "dense"


def test_neurons_that_are_nearly_always_active_are_hot() -> None:
    rates = torch.full((5632,), 0.002)
    rates[[5, 100, 5000]] = 0.9
    rates[1000:1200] = 0.5
    route = choose_route(seen(rates), 16384, 2048)
    assert route.name == "sparse"
    assert route.hot is not None
    assert len(route.hot) == HOT_MULTIPLE
    assert {5, 100, 5000, *range(1000, 1200)} <= set(route.hot.tolist())


def test_the_expensive_way_is_not_taken() -> None:
    rates = torch.full((5632,), 0.003)
    assert choose_route(seen(rates), 16384, 2048, costs=TrainingCosts(call_us=1e6)).name == "dense"
    assert choose_route(seen(rates), 16384, 2048, gated=False).name == "sparse"
