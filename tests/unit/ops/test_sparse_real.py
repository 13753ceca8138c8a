"""The activity of a trained layer: TwELL keeps all of it, and the way taken for it gives the dense result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from onekernel.kernels.sparse_ffn import Slices, SparseShape
from onekernel.ops.sparse import sparse_ffn
from onekernel.ops.sparse_route import Route, choose, hot_first
from onekernel.weights.neuron_rows import DownProjection
from onekernel.weights.twell import TILE_COLUMNS, Twell, TwellStatistics
from tests.real_activity import INNER, TOKENS, feed_forward, real_activity

HIDDEN = 2048


@pytest.fixture(scope="module")
def active() -> torch.Tensor:
    return real_activity()


def test_it_is_what_training_left(active: torch.Tensor) -> None:
    """Few neurons, unevenly: most never fire, and one token has nine times the mean."""
    found = TwellStatistics.of(active)
    counts = found.neuron_counts.sort(descending=True)[0].double()
    assert (found.rows, found.columns, found.nonzeros, found.fullest_row) == (TOKENS, INNER, 182_709, 398)
    assert float(counts[: INNER // 10].sum() / counts.sum()) == pytest.approx(0.82, abs=0.005)
    assert float((counts == 0).double().mean()) == pytest.approx(0.66, abs=0.005)


def overflowing(active: torch.Tensor, capacity: int) -> torch.Tensor:
    """Rows with more nonzeros than this in one of their tiles."""
    tiles = active.float().split(TILE_COLUMNS, dim=1)
    return torch.stack([tile.sum(1) for tile in tiles]).amax(0) > capacity


@pytest.mark.parametrize(("capacity", "overflow"), [(27, 0), (24, 2), (4, 2440)])
def test_twell_loses_nothing_of_it(active: torch.Tensor, capacity: int, overflow: int) -> None:
    draw = torch.Generator().manual_seed(capacity)
    values = (torch.rand(TOKENS, INNER, generator=draw) + 0.1).bfloat16() * active
    packed = Twell.pack(values, capacity)
    assert packed.overflow_rows.tolist() == overflowing(active, capacity).nonzero().flatten().tolist()
    assert len(packed.overflow_rows) == overflow
    assert torch.equal(packed.unpack(), values)


def test_its_way_is_hot_and_cold(active: torch.Tensor) -> None:
    """Measured on an H200 for 16,384 tokens: 1.13 times the dense speed."""
    stats = TwellStatistics.of(active, Slices.plan(SparseShape(), HIDDEN, INNER).tile_columns)
    route = choose(stats, 16384, HIDDEN, SparseShape())
    assert route.name == "hot_cold"
    assert stats.neuron_counts[hot_first(stats, route.hot, 4)[: route.hot]].sum() > 0.5 * stats.nonzeros


@pytest.mark.parametrize("capacity", [None, 2])
def test_the_result_is_the_dense_one(active: torch.Tensor, capacity: int | None) -> None:
    """Of every 64th token and the fullest, with the router's own capacity and with one that many rows overflow."""
    stats = TwellStatistics.of(active, Slices.plan(SparseShape(), HIDDEN, INNER).tile_columns)
    route = choose(stats, 16384, HIDDEN, SparseShape())
    route = route if capacity is None else replace(route, capacity=capacity)
    order = hot_first(stats, route.hot, 4)
    fullest = active.sum(1).argmax()
    some = torch.cat([active[::64], active[fullest][None]])[:, order]
    x, gate, up, down = feed_forward(some)
    totals = torch.zeros(4, dtype=torch.int32)
    got = sparse_ffn(x, gate, up, DownProjection.from_rows(down), route=route, totals=totals)
    want = (F.relu(F.linear(x.double(), gate.double())) * F.linear(x.double(), up.double())) @ down.double()
    assert (got.double() - want).norm() / want.norm() < 5e-3
    cold = some[:, route.hot :]
    over = overflowing(cold, route.capacity)
    assert totals.tolist() == [int(cold[~over].sum()), int(over.sum()), int(over.sum()), len(some)]
    assert (int(over.sum()) > 1) == (capacity is not None)  # the fullest token is one in a thousand
    dense = sparse_ffn(x, gate, up, DownProjection.from_rows(down), route=Route())
    assert (got.double() - dense.double()).norm() / want.norm() < 5e-3
