"""The sparse feed-forward on a real GPU: float32's result on every route, in graphs and on other streams."""

from __future__ import annotations

import pytest
import torch

from benchmarks.sparse_layer import Layer
from benchmarks.sparse_patterns import iid, skew
from onekernel.kernels.sparse_ffn import GATHERED, OVERFLOWED, PACKED, SLICED
from onekernel.ops.sparse import sparse_ffn
from onekernel.ops.sparse_module import SparseFFN
from onekernel.ops.sparse_route import Costs, Route
from onekernel.ops.sparse_router import Router
from onekernel.weights.neuron_rows import DownProjection

pytestmark = pytest.mark.timeout(120)

GPU = "cuda:0"
ROUNDED = 5e-3
"""Relative L2; a dense bf16 feed-forward has 3.3e-3 to 4e-3 against float32."""
ROW = 1.5 * 2**-8
"""Of one row, which may have one neuron only: half of what the three roundings to bf16 on its way can add up to."""

ROUTES = [Route(), Route("gather"), Route("sliced", capacity=128), Route("hot_cold", hot=512, capacity=128)]
SIZES = [(2048, 5632), (2048, 8192), (1000, 3001), (576, 1536), (64, 16)]


def layer(tokens: int, hidden: int, inner: int, fraction: float = 0.02) -> Layer:
    return Layer.of(skew(fraction, 0, tokens, inner), hidden, GPU)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def run(given: Layer, route: Route, totals: torch.Tensor | None = None) -> torch.Tensor:
    down = DownProjection.from_linear(given.down)
    return sparse_ffn(given.x, given.gate, given.up, down, route=route, totals=totals)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
@pytest.mark.parametrize(("hidden", "inner"), SIZES)
@pytest.mark.parametrize("tokens", [1, 129, 512])
def test_every_route_is_float32(route: Route, hidden: int, inner: int, tokens: int) -> None:
    if route.hot >= inner:
        route = Route("sliced", capacity=16)
    given = layer(tokens, hidden, inner, fraction=0.05)
    totals = torch.zeros(4, dtype=torch.int32, device=GPU)
    got = run(given, route, totals)
    assert error(got, given.float32()) < ROUNDED
    found = totals.tolist()
    assert found[SLICED] == tokens * (route.name in ("sliced", "hot_cold"))
    assert found[GATHERED] == (tokens if route.name == "gather" else found[OVERFLOWED])
    assert found[PACKED] > 0 or route.name in ("dense", "gather") or tokens == 1


@pytest.mark.parametrize("route", ROUTES[2:], ids=lambda route: route.name)
def test_a_full_row_and_600_nonzeros_in_one_tile(route: Route) -> None:
    given = layer(300, 2048, 5632, fraction=0.005)
    given.x[0, -1] = 40.0  # every neuron
    given.gate[600:1200, 5] = 8.0
    given.x[1, 5], given.x[1, -1] = 30.0, -1.0
    totals = torch.zeros(4, dtype=torch.int32, device=GPU)
    got, want = run(given, route, totals), given.float32()
    # A row whose only neuron barely fires is a difference of large numbers: it is measured against a usual row.
    sizes = want.double().norm(dim=1)
    errors = (got.double() - want.double()).norm(dim=1) / sizes.clamp(min=float(sizes.median()) / 10)
    assert bool((errors < ROW).all()), errors.max()
    assert totals[OVERFLOWED] == totals[GATHERED] >= 2


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_the_same_bits_every_time(route: Route) -> None:
    given = layer(1000, 2048, 5632)
    first = run(given, route)
    assert all(torch.equal(run(given, route), first) for _ in range(5))


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_a_graph_replays_it_on_new_inputs(route: Route) -> None:
    given, other = layer(256, 2048, 5632), Layer.of(iid(0.03, 256, 5632), 2048, GPU)
    ffn = SparseFFN(given.gate, given.up, DownProjection.from_linear(given.down), route=route)
    x = given.x.clone()
    ffn(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ffn(x)
    for inputs in (given.x, other.x):
        x.copy_(inputs)
        graph.replay()
        changed = Layer(inputs, given.gate, given.up, given.down)
        assert error(out, changed.float32()) < ROUNDED


def test_it_runs_on_the_current_stream() -> None:
    """Behind what that stream has to do, and not on the default one."""
    given = layer(512, 2048, 5632)
    want = given.float32()
    x = torch.zeros_like(given.x)
    run(given, ROUTES[2])  # compiled and loaded before
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        x.copy_(given.x)
        got = run(Layer(x, given.gate, given.up, given.down), ROUTES[2])
    assert not stream.query()
    stream.synchronize()
    assert error(got, want) < ROUNDED


def test_it_measures_chooses_and_keeps_a_graphs_way() -> None:
    given = layer(4096, 2048, 5632, fraction=0.005)
    ffn = SparseFFN(given.gate.clone(), given.up.clone(), DownProjection.from_linear(given.down))
    shape = ffn.router._shape
    ffn.router = Router(shape, 2048, 5632, costs=Costs(call_us=0.0, gathered_bytes_per_us=1.0))
    want = given.float32()
    ways = []
    for _ in range(3):
        assert error(ffn(given.x)[: len(want)], want) < ROUNDED
        torch.cuda.synchronize()
        assert ffn.measured is not None
        ways.append(ffn.measured.route.name)
    assert ways[0] == "dense"
    assert set(ways[1:]) <= {"sliced", "hot_cold"}
    before = int(ffn.totals[SLICED])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ffn(given.x)
    graph.replay()
    assert error(out[: len(want)], want) < ROUNDED
    assert int(ffn.totals[SLICED]) == before + 4096


def test_a_route_never_waits_for_the_device() -> None:
    given = layer(512, 2048, 5632)
    ffn = SparseFFN(given.gate.clone(), given.up.clone(), DownProjection.from_linear(given.down))
    for _ in range(3):
        ffn(given.x)
        torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            ffn(given.x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_many_tokens_are_done_in_turns() -> None:
    given = layer(70_000, 2048, 5632, fraction=0.005)
    got = run(given, Route("sliced", capacity=64))
    for place in (slice(0, 512), slice(69_000, 69_512)):
        part = Layer(given.x[place], given.gate, given.up, given.down)
        assert error(got[place], part.float32()) < ROUNDED
