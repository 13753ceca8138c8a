"""The sparse feed-forward gives the dense one's result on every route, and refuses what it cannot read rightly."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from onekernel.errors import ConfigError
from onekernel.kernels.sparse_ffn import GATHERED, OVERFLOWED, PACKED, SLICED
from onekernel.ops.sparse import sparse_ffn
from onekernel.ops.sparse_route import Route
from onekernel.weights.neuron_rows import DownProjection

ROUNDED = 5e-3
"""Relative L2 of bf16 in and out: gate, inner activation and result are rounded."""

ROUTES = [Route(), Route("gather"), Route("sliced", capacity=16), Route("hot_cold", hot=64, capacity=8)]


def weights(hidden: int, inner: int) -> tuple[torch.Tensor, ...]:
    """Gate, up and down as nn.Linear has them; x's first column, which is 1, makes most gates negative."""
    torch.manual_seed(hidden + inner)
    gate, up = torch.randn(inner, hidden) / hidden**0.5, torch.randn(inner, hidden) / hidden**0.5
    gate[:, 0] = -1.5
    return gate.bfloat16(), up.bfloat16(), (torch.randn(hidden, inner) / inner**0.5).bfloat16()


def inputs(*shape: int) -> torch.Tensor:
    torch.manual_seed(len(shape))
    x = torch.randn(*shape)
    x[..., 0] = 1.0
    return x.bfloat16()


def dense(x: torch.Tensor, gate: torch.Tensor | None, up: torch.Tensor, down: torch.Tensor, square: bool):
    """What the operator promises, in float64 but for the rounding of the gate's product, which decides the zeros."""
    first = F.linear(x.float(), (up if gate is None else gate).float()).to(x.dtype)
    inner = F.relu(first.double())
    inner = inner.square() if square else inner
    if gate is not None:
        inner = inner * F.linear(x.double(), up.double())
    return F.linear(inner, down.double())


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize(("hidden", "inner"), [(64, 160), (100, 301)])
def test_every_route_is_the_dense_result(route: Route, gated: bool, activation: str, hidden: int, inner: int) -> None:
    gate, up, down = weights(hidden, inner)
    x = inputs(3, 7, hidden)
    if not gated:
        gate, up = None, gate
    totals = torch.zeros(4, dtype=torch.int32)
    got = sparse_ffn(x, gate, up, DownProjection.from_linear(down), activation=activation, route=route, totals=totals)
    want = dense(x, gate, up, down, activation == "relu2")
    assert 0.05 < float((F.linear(x.float(), (up if gate is None else gate).float()) > 0).float().mean()) < 0.3
    assert got.shape == x.shape
    assert got.dtype is torch.bfloat16
    assert error(got, want) < ROUNDED
    assert (totals[GATHERED], totals[SLICED]) == {
        "dense": (0, 0),
        "gather": (21, 0),
        "sliced": (int(totals[OVERFLOWED]), 21),
        "hot_cold": (int(totals[OVERFLOWED]), 21),
    }[route.name]
    assert (totals[PACKED] > 0) == (route.name in ("sliced", "hot_cold"))


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_a_full_row_and_600_nonzeros_in_one_tile(route: Route) -> None:
    gate, up, down = weights(64, 1040)
    x = inputs(6, 64)
    x[0, 0], x[1, 0] = -100.0, 0.0
    gate[200:800, 1] = 30.0
    x[1, 1], x[2, 1] = 1.0, -1.0
    totals = torch.zeros(4, dtype=torch.int32)
    got = sparse_ffn(x, gate, up, DownProjection.from_linear(down), route=route, totals=totals)
    want = dense(x, gate, up, down, False)
    for row in range(6):
        assert error(got[row], want[row]) < ROUNDED
    assert (totals[OVERFLOWED] > 0) == (route.name in ("sliced", "hot_cold"))


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_no_tokens_and_one(route: Route) -> None:
    gate, up, down = weights(64, 160)
    projection = DownProjection.from_linear(down)
    assert sparse_ffn(inputs(0, 64), gate, up, projection, route=route).shape == (0, 64)
    x = inputs(1, 64)
    assert error(sparse_ffn(x, gate, up, projection, route=route), dense(x, gate, up, down, False)) < ROUNDED


def test_float32_goes_densely_and_is_exact() -> None:
    gate, up, down = (tensor.float() for tensor in weights(64, 160))
    x = inputs(5, 64).float()
    projection = DownProjection.from_linear(down)
    assert error(sparse_ffn(x, gate, up, projection), dense(x, gate, up, down, False)) < 1e-6
    with pytest.raises(ConfigError, match=r"x is torch.float32; the sliced route takes bfloat16"):
        sparse_ffn(x, gate, up, projection, route=Route("sliced"))


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_gradients_are_those_of_the_dense_formula(route: Route) -> None:
    gate, up, down = (tensor.float().requires_grad_() for tensor in weights(64, 160))
    x = inputs(5, 64).float().requires_grad_()
    projection = DownProjection.from_linear(down)
    sparse_ffn(x, gate, up, projection, activation="relu2", route=route).square().sum().backward()
    got = [tensor.grad for tensor in (x, gate, up, down)]
    for tensor in (x, gate, up, down):
        tensor.grad = None
    (F.linear(F.relu(F.linear(x, gate)).square() * F.linear(x, up), down)).square().sum().backward()
    for mine, tensor in zip(got, (x, gate, up, down), strict=True):
        torch.testing.assert_close(mine, tensor.grad)


@pytest.mark.parametrize(("route", "gated"), [(ROUTES[0], True), (ROUTES[1], False), (ROUTES[3], True)])
def test_the_operator_keeps_to_pytorchs_rules(route: Route, gated: bool) -> None:
    """Its schema says what it changes, and its fake version has the result's shape, dtype and strides."""
    gate, up, down = weights(64, 160)
    args = (inputs(5, 64), gate if gated else None, up, down.t().contiguous())
    totals = torch.zeros(4, dtype=torch.int32)
    rest = (totals, None, "relu", route.name, route.hot, route.capacity)
    torch.library.opcheck(torch.ops.onekernel.sparse_ffn, (*args, *rest), test_utils=("test_schema", "test_faketensor"))


def test_it_compiles_as_one_graph() -> None:
    gate, up, down = weights(64, 160)
    projection = DownProjection.from_linear(down)

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return sparse_ffn(x * 2, gate, up, projection, route=Route("sliced")) + 1

    x = inputs(5, 64)
    assert torch.equal(compiled(x), sparse_ffn(x * 2, gate, up, projection, route=Route("sliced")) + 1)


@pytest.mark.complaint(
    "L7", file="weights/neuron_rows.py", old="cls(weight.t().contiguous())", new="cls(weight.contiguous())"
)
def test_a_square_down_projection_cannot_be_misread() -> None:
    """Where hidden_size is intermediate_size, shapes say nothing: the type does, and a bare matrix is refused."""
    gate, up, down = weights(64, 64)
    x = inputs(9, 64)
    want = dense(x, gate, up, down, False)
    assert error(sparse_ffn(x, gate, up, DownProjection.from_linear(down)), want) < ROUNDED
    assert error(sparse_ffn(x, gate, up, DownProjection.from_rows(down.t())), want) < ROUNDED
    with pytest.raises(ConfigError, match="is a Tensor, which does not say how it lies"):
        sparse_ffn(x, gate, up, down)  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused() -> None:
    gate, up, down = weights(64, 160)
    x, projection = inputs(5, 64), DownProjection.from_linear(down)
    with pytest.raises(ConfigError, match=r"has \(64, 160\) neurons and outputs where up has \(160, 64\)"):
        sparse_ffn(x, gate, up, DownProjection.from_rows(down))
    with pytest.raises(ConfigError, match=r"gate has shape \(150, 64\), up \(160, 64\)"):
        sparse_ffn(x, gate[:150], up, projection)
    with pytest.raises(ConfigError, match=r"x has shape \(5, 63\); up takes \(..., 64\)"):
        sparse_ffn(x[:, :63], gate, up, projection)
    with pytest.raises(ConfigError, match=r"x has shape \(\); up takes"):
        sparse_ffn(x[0, 0], gate, up, projection)
    with pytest.raises(ConfigError, match="activation is 'silu'; it must be relu or relu2"):
        sparse_ffn(x, gate, up, projection, activation="silu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "totals",
    [
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(4),
        torch.zeros(8, dtype=torch.int32)[::2],
        torch.zeros(4, dtype=torch.int32, device="meta"),
    ],
)
def test_totals_that_the_kernels_would_write_beyond_are_refused(totals: torch.Tensor) -> None:
    gate, up, down = weights(64, 160)
    with pytest.raises(ConfigError, match=r"totals are torch.* they must be contiguous int32 \(4,\) on cpu"):
        sparse_ffn(inputs(5, 64), gate, up, DownProjection.from_linear(down), route=Route("gather"), totals=totals)
