"""A feed-forward in training gives autograd's gradients on every route, and lives with what training does around it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from onekernel.errors import ConfigError
from onekernel.ops.sparse_training import SparseFFN, Trained, TrainingRoute, l1_loss, train_ffn

HIDDEN, INNER, TOKENS = 24, 70, 37
L1 = 0.3


@dataclass(frozen=True, slots=True)
class Case:
    x: Tensor
    gate: Tensor | None
    up: Tensor
    down: Tensor
    grad_out: Tensor

    @classmethod
    def random(cls, fraction: float, *, gated: bool = True, dtype: torch.dtype = torch.float64) -> Case:
        """x's first column is 1 and the deciding weights' sets the share of active neurons."""
        draw = torch.Generator().manual_seed(int(fraction * 1000) + gated)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        x, first = normal(TOKENS, HIDDEN), normal(INNER, HIDDEN) / HIDDEN**0.5
        x[:, 0] = 1.0
        first[:, 0] = torch.special.ndtri(torch.tensor(fraction, dtype=torch.float64)).clamp(-100, 100)
        up, down = normal(INNER, HIDDEN) / HIDDEN**0.5, normal(HIDDEN, INNER) / INNER**0.5
        tensors = (x, first, up, down, normal(TOKENS, HIDDEN))
        x, first, up, down, grad_out = (tensor.to(dtype) for tensor in tensors)
        return cls(x, first if gated else None, up if gated else first, down, grad_out)

    @property
    def leaves(self) -> list[Tensor]:
        return [t.clone().requires_grad_() for t in (self.x, self.gate, self.up, self.down) if t is not None]

    def call(self, leaves: list[Tensor], route: TrainingRoute | None, activation: str = "relu", **more) -> Trained:
        x, *weights = leaves
        gate, up, down = weights if self.gate is not None else (None, *weights)
        return train_ffn(x, gate, up, down, activation=activation, route=route, **more)

    def gradients(self, route: TrainingRoute | str | None, activation: str = "relu") -> list[Tensor]:
        """Of sum(out * grad_out) + L1 * penalty; first out and penalty themselves."""
        leaves = self.leaves
        found = self.call(leaves, route, activation)
        ((found.out * self.grad_out).sum() + L1 * found.penalty).backward()
        return [found.out.detach(), found.penalty.detach(), *(leaf.grad for leaf in leaves)]

    def formula(self, square: bool) -> list[Tensor]:
        """The same by autograd, from the formula alone."""
        leaves = self.leaves
        x, *weights = leaves
        first = F.relu(F.linear(x, weights[0]))
        inner = first.square() if square else first
        if self.gate is not None:
            inner = inner * F.linear(x, weights[1])
        out, penalty = F.linear(inner, weights[-1]), inner.abs().sum(-1).mean()
        ((out * self.grad_out).sum() + L1 * penalty).backward()
        return [out.detach(), penalty.detach(), *(leaf.grad for leaf in leaves)]


HOT = torch.tensor([3, 69, 10])
ROUTES = {"dense": TrainingRoute(), "sparse": "sparse", "hot": TrainingRoute("sparse", HOT)}


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("fraction", [0.0, 0.03, 0.5, 1.0])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_gradients_are_autograds(fraction: float, route: str, gated: bool, activation: str) -> None:
    case = Case.random(fraction, gated=gated)
    for got, want in zip(case.gradients(ROUTES[route], activation), case.formula(activation == "relu2"), strict=True):
        torch.testing.assert_close(got, want)
    share = float((F.linear(case.x, case.up if case.gate is None else case.gate) > 0).double().mean())
    assert abs(share - fraction) < 0.05


@pytest.mark.parametrize("route", ["sparse", "hot"])
@pytest.mark.parametrize(("gated", "activation"), [(True, "relu"), (True, "relu2"), (False, "relu2")])
def test_gradcheck(route: str, gated: bool, activation: str) -> None:
    case = Case.random(0.3, gated=gated)
    small = replace(case, x=case.x[:5])

    def outputs(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        found = small.call(list(leaves), ROUTES[route], activation)
        return found.out, found.penalty

    assert torch.autograd.gradcheck(outputs, small.leaves, fast_mode=True)


@pytest.mark.parametrize("route", ["sparse", "hot"])
@pytest.mark.parametrize("fraction", [0.02, 0.4])
def test_bf16_is_as_near_to_float32_as_dense_bf16(route: str, fraction: float) -> None:
    case = Case.random(fraction, dtype=torch.bfloat16)
    exact = Case(*(t.float() for t in (case.x, case.gate, case.up, case.down, case.grad_out))).formula(False)
    for mine, dense, want in zip(case.gradients(ROUTES[route]), case.gradients(None), exact, strict=True):
        assert mine.dtype is dense.dtype
        assert error(mine, want) < max(1.2 * error(dense, want), 3e-3)


@pytest.mark.parametrize("route", ROUTES)
def test_counts(route: str) -> None:
    case = Case.random(0.1)
    found = case.call(case.leaves, ROUTES[route], count_neurons=True)
    active = F.linear(case.x, case.gate) > 0
    assert torch.equal(found.row_counts, active.sum(1, dtype=torch.int32))
    assert torch.equal(found.neuron_counts, active.sum(0))
    assert case.call(case.leaves, ROUTES[route]).neuron_counts is None


@pytest.mark.parametrize("route", ["sparse", "hot"])
def test_the_operator_keeps_to_pytorchs_rules(route: str) -> None:
    case = Case.random(0.2, gated=route == "sparse", dtype=torch.bfloat16 if route == "sparse" else torch.float32)
    x, *weights = case.leaves
    gate, up, down = weights if case.gate is not None else (None, *weights)
    hot = torch.empty(0, dtype=torch.int64) if route == "sparse" else HOT
    torch.library.opcheck(
        torch.ops.onekernel.train_ffn,
        (x, gate, up, down, hot, "relu"),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize("route", ROUTES)
def test_it_compiles_as_one_graph(route: str) -> None:
    case = Case.random(0.2, dtype=torch.float32)
    want = case.gradients(ROUTES[route])
    leaves = case.leaves

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(*leaves: Tensor) -> Tensor:
        found = case.call(list(leaves), ROUTES[route])
        return (found.out * case.grad_out).sum() + L1 * found.penalty

    loss(*leaves).backward()
    for leaf, expected in zip(leaves, want[2:], strict=True):
        torch.testing.assert_close(leaf.grad, expected)


def module(route: str = "sparse", *, gated: bool = True) -> SparseFFN:
    torch.manual_seed(0)
    ffn = SparseFFN(HIDDEN, INNER, gated=gated)
    ffn.route = ROUTES[route]
    return ffn


def loss_of(found: Trained) -> Tensor:
    return found.out.float().square().sum() + l1_loss([found.penalty, found.penalty], L1)


@pytest.mark.parametrize("route", ROUTES)
def test_activation_checkpointing_changes_nothing(route: str) -> None:
    x = torch.randn(2, 9, HIDDEN)
    plain, again = module(route), module(route)
    loss_of(plain(x)).backward()
    loss_of(checkpoint(again, x, use_reentrant=False)).backward()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("route", ROUTES)
def test_under_autocast_float32_weights_get_float32_gradients(route: str) -> None:
    ffn, x = module(route), torch.randn(2, 9, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        found = ffn(x)
    assert found.out.dtype is torch.bfloat16
    assert found.penalty.dtype is torch.float32
    loss_of(found).backward()
    exact = copy.deepcopy(ffn)
    exact.zero_grad()
    loss_of(exact(x)).backward()
    for one, other in zip(ffn.parameters(), exact.parameters(), strict=True):
        assert one.grad.dtype is torch.float32
        assert error(one.grad, other.grad) < 0.02


@pytest.mark.parametrize("route", ["sparse", "hot"])
def test_a_backward_inside_of_autocast_is_the_same(route: str) -> None:
    x, found = torch.randn(9, HIDDEN), []
    for inside in (False, True):
        ffn = module(route)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(ffn(x))
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            loss.backward()
        found.append([parameter.grad for parameter in ffn.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("route", ["sparse", "hot"])
def test_gradients_of_parts_add_up_in_float32(route: str) -> None:
    """Two micro-batches, with weights in float32 and everything else in bf16, give the sum of both gradients."""
    case = Case.random(0.2, dtype=torch.float32)
    leaves = [leaf.detach().requires_grad_() for leaf in case.leaves[1:]]
    whole = []
    for part in (slice(0, 20), slice(20, None)):
        found = case.call([case.x[part].bfloat16(), *leaves], ROUTES[route])
        (found.out * case.grad_out[part]).sum().backward()
        whole.append([leaf.grad.clone() for leaf in leaves])
    for index, leaf in enumerate(leaves):
        second = whole[1][index] - whole[0][index]
        assert leaf.grad.dtype is torch.float32
        assert error(leaf.grad, whole[0][index] + second) < 1e-6
        assert not torch.equal(leaf.grad, leaf.grad.bfloat16().float())


@pytest.mark.parametrize("route", ROUTES)
def test_two_runs_give_the_same_bits(route: str) -> None:
    case = Case.random(0.2, dtype=torch.bfloat16)
    assert all(
        torch.equal(one, other)
        for one, other in zip(case.gradients(ROUTES[route]), case.gradients(ROUTES[route]), strict=True)
    )


@pytest.mark.parametrize("route", ROUTES)
def test_no_tokens(route: str) -> None:
    ffn = module(route)
    found = ffn(torch.randn(0, HIDDEN))
    assert found.out.shape == (0, HIDDEN)
    assert found.penalty == 0.0
    loss_of(found).backward()
    assert all(not parameter.grad.any() for parameter in ffn.parameters())


def test_parameters_have_the_names_of_a_checkpoint() -> None:
    assert [name for name, _ in module().named_parameters()] == [
        "gate_proj.weight",
        "up_proj.weight",
        "down_proj.weight",
    ]
    assert len(list(module(gated=False).parameters())) == 2


def test_what_does_not_fit_is_refused() -> None:
    case = Case.random(0.2)
    x, gate, up, down = case.leaves
    with pytest.raises(ConfigError, match=r"x has shape \(37, 23\), up \(70, 24\); up takes \(..., 24\)"):
        train_ffn(x[:, 1:], gate, up, down)
    with pytest.raises(ConfigError, match=r"gate has shape \(69, 24\), up \(70, 24\)"):
        train_ffn(x, gate[1:], up, down)
    with pytest.raises(ConfigError, match=r"down has shape \(70, 24\); beside up of \(70, 24\) it must be \(24, 70\)"):
        train_ffn(x, gate, up, down.t())
    with pytest.raises(ConfigError, match="activation is 'silu'; it must be relu or relu2"):
        train_ffn(x, gate, up, down, activation="silu")
    with pytest.raises(ConfigError, match=r"the weights are torch.float32, torch.float64; they must have one"):
        train_ffn(x, gate.float(), up, down)
    with pytest.raises(ConfigError, match="the hot neurons are on meta, x on cpu"):
        train_ffn(x, gate, up, down, route=TrainingRoute("sparse", HOT.to("meta")))
    with pytest.raises(ConfigError, match="route is 'quick'; it must be dense or sparse"):
        TrainingRoute("quick")
    with pytest.raises(ConfigError, match=r"hot neurons are torch.int64 \(3,\) on route dense"):
        TrainingRoute("dense", HOT)
