"""The operator's GPU side from end to end on the shim: every route through the kernels, beside the CPU's arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onekernel.errors import ConfigError
from onekernel.kernels.sparse_ffn import GATHERED, SLICED, SparseKernels, SparseShape
from onekernel.ops.sparse import on_cpu, on_gpu
from onekernel.ops.sparse_route import Route
from onekernel.weights.twell import TwellStatistics
from tests.real_activity import feed_forward, real_activity

SHAPE = SparseShape(up_warps=2, down_warps=2, pack_warps=2, gather_warps=2)
ROUTES = [Route(), Route("gather"), Route("sliced", capacity=48), Route("hot_cold", hot=64, capacity=32)]
TILE = 96


def case(hidden: int, inner: int) -> list[torch.Tensor]:
    """x, gate, up, down rows; token 0 has every neuron active, token 1 none."""
    torch.manual_seed(0)
    x, gate = torch.randn(11, hidden), torch.randn(inner, hidden) / hidden**0.5
    x[:, 0], gate[:, 0] = 1.0, -1.5
    x[0, 0], x[1, 0] = -50.0, 50.0
    up, down = torch.randn(inner, hidden) / hidden**0.5, torch.randn(inner, hidden) / inner**0.5
    return [tensor.bfloat16() for tensor in (x, gate, up, down)]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, gated=False, activation="relu2")], ids=["gated", "plain"])
def test_the_kernels_give_what_the_cpu_gives(shim, route: Route, shape: SparseShape) -> None:
    x, gate, up, down = case(100, 301)
    given = (x, gate, up, down) if shape.gated else (x, None, gate, down)
    totals, measured = torch.zeros(2, 4, dtype=torch.int32), []
    results = []
    for turn, way in enumerate((SparseKernels(shape, shim, 2), shape)):
        found = torch.zeros(TwellStatistics.numbers(304 if turn == 0 else 301, TILE), dtype=torch.int64)
        run = on_gpu if turn == 0 else on_cpu
        results.append(run(way, *given, totals[turn], found, route).double())  # type: ignore[operator]
        measured.append(TwellStatistics.read(found, 11, 304 if turn == 0 else 301))
    assert (results[0] - results[1]).norm() / results[1].norm() < 4e-3
    assert results[0].shape == x.shape
    assert measured[0].nonzeros == measured[1].nonzeros
    assert measured[0].fullest_row == 301
    assert totals[:, SLICED].tolist() == [11 * (route.name in ("sliced", "hot_cold"))] * 2
    assert totals[0, GATHERED] == {"dense": 0, "gather": 11, "sliced": 1, "hot_cold": 1}[route.name]


def test_other_dtypes_are_refused(shim) -> None:
    x, gate, up, down = (tensor.float() for tensor in case(64, 112))
    with pytest.raises(ConfigError, match=r"x is torch.float32, up torch.float32; the kernels take bfloat16"):
        on_gpu(SparseKernels(SHAPE, shim, 2), x, gate, up, down, torch.zeros(4, dtype=torch.int32), None, Route())


def test_a_trained_layers_activity_goes_through_the_kernels(shim) -> None:
    """Of 64 tokens and the fullest, with the hottest neurons densely and room that a few rows exceed."""
    active = real_activity()
    some = torch.cat([active[::64][:63], active[active.sum(1).argmax()][None]])
    order = active.sum(0).argsort(descending=True, stable=True)[:1024]
    given = feed_forward(some[:, order])
    route = Route("hot_cold", hot=64, capacity=48)
    totals = torch.zeros(2, 4, dtype=torch.int32)
    got = on_gpu(SparseKernels(SHAPE, shim, 3), *given, totals[0], None, route).double()
    want = on_cpu(SHAPE, *given, totals[1], None, replace(route, name="dense", hot=0)).double()
    assert (got - want).norm() / want.norm() < 4e-3
    over = some[:, order[64:]].sum(1) > 48
    assert 0 < over.sum() < 16
    assert totals[0].tolist() == [int(some[~over][:, order[64:]].sum()), int(over.sum()), int(over.sum()), len(some)]
