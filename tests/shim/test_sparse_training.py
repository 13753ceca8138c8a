"""The kernels of sparse training against the same formulas in float32, at small odd shapes and every sparsity."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from onekernel.device.kernel import Kernel
from onekernel.device.shim_build import Build
from onekernel.device.spec import KernelSpec
from onekernel.errors import ConfigError, DeviceError
from onekernel.kernels.sparse_training import TrainingKernels, TrainingShape
from onekernel.ops import training_formulas as formulas
from onekernel.ops import training_gpu, training_hot
from onekernel.ops.training_formulas import Gradients, Weights
from onekernel.ops.training_gpu import Forward, backward_with, forward_with, hot_backward_with

ROUNDED = 4e-3
"""Relative L2: results are rounded to bf16 (1.7e-3); where others are there before they are rounded twice."""

EXACT = 2e-6
"""Relative L2 of float32 sums in another order."""

SHARED = 1 << 17

Load = Callable[[KernelSpec], Kernel]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory that nobody wrote holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True, slots=True)
class Case:
    x: torch.Tensor
    weights: Weights
    grad_out: torch.Tensor
    l1: torch.Tensor
    square: bool

    @classmethod
    def random(
        cls, tokens: int, hidden: int, inner: int, fraction: float, *, gated: bool = True, square: bool = False
    ) -> Case:
        draw = torch.Generator().manual_seed(tokens * hidden + inner)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw)

        x, first = normal(tokens, hidden), normal(inner, hidden) / hidden**0.5
        x[:, 0] = 1.0
        first[:, 0] = torch.special.ndtri(torch.tensor(fraction, dtype=torch.float64)).clamp(-50, 50)
        up, down = normal(inner, hidden) / hidden**0.5, normal(inner, hidden) / inner**0.5
        first, up, down = first.bfloat16(), up.bfloat16(), down.bfloat16()
        weights = Weights(first, up, down) if gated else Weights(None, first, down)
        return cls(x.bfloat16(), weights, normal(tokens, hidden).bfloat16(), torch.tensor(0.2), square)

    @property
    def first(self) -> torch.Tensor:
        return (self.x.float() @ self.weights.first.float().t()).bfloat16()

    @property
    def active(self) -> torch.Tensor:
        return self.first > 0

    def kernels(self, load: Load, *, shared: int = SHARED, **shape) -> TrainingKernels:
        hidden = -(-self.x.shape[1] // 8) * 8
        shape = {"float_gradients": True, "gated": self.weights.gate is not None, "square": self.square} | shape
        given = TrainingShape(hidden, **shape)
        return TrainingKernels(given, load, 3, shared)

    def want(self) -> tuple[torch.Tensor, torch.Tensor]:
        up = None if self.weights.gate is None else self.x.float() @ self.weights.up.float().t()
        return formulas.forward(self.x, self.weights, self.first, up, self.square)

    def want_gradients(self, active: torch.Tensor | None = None) -> Gradients:
        weights = Weights(*(None if weight is None else weight.float() for weight in self.weights))
        x, grad_out, active = self.x.float(), self.grad_out.float(), self.active if active is None else active
        first, up = formulas.products(x, weights)
        return formulas.backward(grad_out, self.l1, x, weights, first, up, active, self.square)

    def forward(self, kernels: TrainingKernels) -> Forward:
        return forward_with(kernels, self.x, self.weights, torch.empty(0, dtype=torch.int64))

    def backward(self, kernels: TrainingKernels, base: torch.Tensor | None = None) -> Gradients:
        masks = formulas.pack_bits(self.active)
        return backward_with(kernels, self.grad_out, self.l1, self.x, self.weights, masks, base)

    def check(self, kernels: TrainingKernels) -> None:
        """Forward and backward are the formulas', the weights' gradients to the float32 sum where they are float32."""
        cold, (out, total) = self.forward(kernels), self.want()
        assert error(cold.out, out) < ROUNDED
        assert error(cold.total, total) < ROUNDED
        assert torch.equal(formulas.unpack_bits(cold.masks, len(self.weights.up)), self.active)
        assert torch.equal(cold.row_counts, self.active.sum(1, dtype=torch.int32))
        got, want = self.backward(kernels), self.want_gradients()
        assert error(got.x, want.x) < ROUNDED
        bound = EXACT if kernels.shape.float_gradients else ROUNDED
        assert (got.gate is None) == (want.gate is None)
        if got.gate is not None:
            assert error(got.gate, want.gate) < bound
        assert error(got.up, want.up) < bound
        assert error(got.down_rows, want.down_rows) < bound


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


HIDDEN = 264
"""Two warps, the second with one column: with squares and float32 gradients, so that most tests share five builds."""

USUAL = {
    "usual": Case.random(5, HIDDEN, 70, 0.2, square=True),
    "nothing active": Case.random(3, HIDDEN, 40, 0.0, square=True),
    "everything active": Case.random(3, HIDDEN, 40, 1.0, square=True),
}


@pytest.mark.parametrize("name", USUAL)
def test_the_kernels_are_the_formulas(device, name: str) -> None:
    case = USUAL[name]
    kernels = case.kernels(device.load)
    assert (kernels.shape.threads, kernels.shape.vectors, kernels.shape.batch(3, SHARED)) == (64, 1, 4)
    case.check(kernels)


def check_many_neurons(load: Load) -> None:
    """More neurons than one segment of bits: 64 words."""
    case = Case.random(2, HIDDEN, 2100, 0.05, square=True)
    kernels = case.kernels(load)
    assert error(case.forward(kernels).out, case.want()[0]) < ROUNDED
    gate, up, down = (training_gpu.padded(weight) for weight in case.weights)
    masks, l1, grad_x = formulas.pack_bits(case.active), case.l1.reshape(1), torch.empty_like(case.x)
    kernels.backward_tokens(case.x, case.grad_out, l1, masks, gate, up, down, grad_x, accumulate=False)
    assert error(grad_x, case.want_gradients().x) < ROUNDED


def test_many_neurons_by_token(shim) -> None:
    check_many_neurons(shim)


OTHER_BUILDS = {
    "ReLU, bf16 gradients": (Case.random(9, 72, 70, 0.1), {"float_gradients": False}, SHARED, 4),
    "no gate": (Case.random(6, 70, 33, 0.2, gated=False, square=True), {}, SHARED, 4),
    "two vectors a thread, two rows at a time": (Case.random(3, 520, 40, 0.3), {"most_threads": 64}, 30000, 2),
    "one row at a time": (Case.random(4, 64, 40, 0.3), {}, 6100, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_BUILDS)
def test_other_builds_are_the_formulas(device, name: str) -> None:
    case, shape, shared, batch = OTHER_BUILDS[name]
    kernels = case.kernels(device.load, shared=shared, **shape)
    assert kernels.shape.batch(3, shared) == batch
    case.check(kernels)


def test_many_tokens_by_neuron(device) -> None:
    """More of them than one segment of bits: 64 words, and the last block is not full."""
    case = Case.random(2101, HIDDEN, 20, 0.02, square=True)
    kernels = case.kernels(device.load)
    masks = formulas.pack_bits(case.active)
    by_neuron, counts = kernels.transpose(masks)
    assert torch.equal(formulas.unpack_bits(by_neuron[:20], 2101), case.active.t())
    assert torch.equal(counts[:20], case.active.sum(0, dtype=torch.int32))
    assert not by_neuron[20:].any()
    gate, up, down = (training_gpu.padded(weight) for weight in case.weights)
    found = kernels.weight_gradients(case.x, case.grad_out, case.l1.reshape(1), by_neuron, gate, up, down)
    want = case.want_gradients()
    for got, wanted in zip(found, (want.gate, want.up, want.down_rows), strict=True):
        assert error(got[:20], wanted) < EXACT
        assert not got[20:].any()


def test_it_adds_to_what_hot_neurons_gave(device) -> None:
    case, base = Case.random(5, HIDDEN, 64, 0.2, square=True), torch.randn(5, HIDDEN).bfloat16()
    kernels = case.kernels(device.load)
    assert error(case.backward(kernels, base.clone()).x, case.want_gradients().x + base.float()) < ROUNDED


HOT = torch.tensor([57, 1, 16])
"""Of 70 neurons; their products have eight columns."""


def check_hot(case: Case, kernels: TrainingKernels, hot: torch.Tensor) -> list[torch.Tensor]:
    """Hot and cold neurons together are the formulas'; returns all results."""
    found = forward_with(kernels, case.x, case.weights, hot)
    out, total = case.want()
    masks = formulas.pack_bits(case.active.index_fill(1, hot, False))
    assert torch.equal(found.masks, masks)
    assert torch.equal(found.row_counts, case.active.sum(1, dtype=torch.int32))
    assert error(found.first[:, : len(hot)], case.first[:, hot]) < ROUNDED
    assert not found.first[:, len(hot) :].any()
    assert error(found.out, out) < 2 * ROUNDED
    assert error(found.total, total) < ROUNDED
    weights = Weights(*(None if weight is None else weight[hot] for weight in case.weights))
    dense = hot_backward_with(kernels, case.grad_out, case.l1, case.x, weights, found.first, torch.float32)
    grads = backward_with(kernels, case.grad_out, case.l1, case.x, case.weights, masks, dense.x)
    want = case.want_gradients()
    assert error(grads.x, want.x) < 2 * ROUNDED
    for whole, part, wanted in zip(grads[1:], dense[1:], want[1:], strict=True):
        assert (whole is None) == (part is None) == (wanted is None)
        if whole is not None:
            assert not whole[hot].any()
            assert part.dtype is torch.float32
            assert error(part, wanted[hot]) < 2 * ROUNDED
            assert error(whole.index_copy(0, hot, part), wanted) < 2 * ROUNDED
    return [found.out, found.total, grads.x, *(part for part in dense[1:] if part is not None)]


def test_hot_and_cold_neurons_together(device) -> None:
    case = USUAL["usual"]
    kernels = case.kernels(device.load)
    once, again = (check_hot(case, kernels, HOT) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
    check_hot(case, kernels, torch.arange(70))
    check_hot(USUAL["nothing active"], kernels, torch.tensor([3, 39]))


def test_hot_neurons_take_turns(device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_hot, "TURN_VALUES", 16)
    monkeypatch.setattr(training_hot, "TURN_MULTIPLE", 1)
    monkeypatch.setattr(training_gpu, "TURN_TOKENS", 3)
    case = USUAL["usual"]
    check_hot(case, case.kernels(device.load), HOT)


@pytest.mark.slow
@pytest.mark.parametrize(("gated", "square"), [(True, False), (False, True), (False, False)])
def test_hot_neurons_of_other_builds(shim, monkeypatch: pytest.MonkeyPatch, gated: bool, square: bool) -> None:
    monkeypatch.setattr(training_hot, "TURN_VALUES", 64)
    monkeypatch.setattr(training_hot, "TURN_MULTIPLE", 1)
    case = Case.random(6, 70, 33, 0.4, gated=gated, square=square)
    check_hot(case, case.kernels(shim), torch.tensor([0, 32, 7, 8, 31, 2, 3, 4, 5]))


def test_hot_values_that_are_not_finite_stay_in_their_token(device) -> None:
    case = Case.random(5, HIDDEN, 64, 0.2, square=True)
    case.x[2, 5] = torch.nan
    kernels, others, hot = case.kernels(device.load), [0, 1, 3, 4], torch.tensor([1, 63])
    found = forward_with(kernels, case.x, case.weights, hot)
    assert found.out[2].isnan().all()
    assert found.row_counts[2] == 64
    assert error(found.out[others], case.want()[0][others]) < 2 * ROUNDED
    weights = Weights(*(None if weight is None else weight[hot] for weight in case.weights))
    got = hot_backward_with(kernels, case.grad_out, case.l1, case.x, weights, found.first, torch.float32)
    assert got.x[2].isnan().all()
    assert not got.x[others].isnan().any()


def test_turns_give_the_same_bits(device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.random(7, HIDDEN, 64, 0.2, square=True)
    whole = case.forward(case.kernels(device.load))
    monkeypatch.setattr(training_gpu, "TURN_TOKENS", 3)
    turns = case.forward(case.kernels(device.load))
    assert all(torch.equal(one, other) for one, other in zip(whole, turns, strict=True))


def test_what_is_not_finite_stays_in_its_token(device) -> None:
    case = Case.random(5, HIDDEN, 64, 0.2, square=True)
    case.x[2, 5] = torch.nan
    kernels, others = case.kernels(device.load), [0, 1, 3, 4]
    masks = formulas.pack_bits(case.active)
    cold = case.forward(kernels)
    assert cold.out[2].isnan().all()
    assert cold.row_counts[2] == 64
    assert error(cold.out[others], case.want()[0][others]) < ROUNDED
    got = backward_with(kernels, case.grad_out, case.l1, case.x, case.weights, cold.masks, None)
    want = replace(case, x=case.x.nan_to_num(0)).want_gradients(formulas.unpack_bits(masks, 64))
    assert got.x[2].isnan().all()
    assert error(got.x[others], want.x[others]) < ROUNDED


@pytest.mark.slow
def test_sanitizers_find_nothing(shim) -> None:
    """In two of the three kernels that gather; the third has no code of its own that touches memory otherwise."""

    def load(spec: KernelSpec) -> Kernel:
        return shim(spec, build=Build.ADDRESS if spec.entry in ("train_forward", "train_weights") else Build.PLAIN)

    case = USUAL["usual"]
    case.check(case.kernels(load))


FAULTS = {
    "the list of the segment before": ("sparse/training.cuh", "first = begin * WARP;", "first = 0;"),
    "sums of one warp": ("sparse/training.cuh", "warp < TRAIN_WARPS; warp++) total +=", "warp < 1; warp++) total +="),
    "halves not given away": ("sparse/training.cuh", "sent = upper ? v[i] : v[i + HALF]", "sent = v[i]"),
    "copies not waited for": ("sparse/train_tokens.cu", "async_copies_wait<1>();", ";"),
    "no penalty": ("sparse/gradients.cuh", "grad_out + l1 * sign", "grad_out"),
    "slope of ReLU": ("sparse/gradients.cuh", "SQUARE ? 2.0f * first : 1.0f", "1.0f"),
    "a bit of another token": ("sparse/train_transpose.cu", "bits >> neuron & 1", "bits >> (neuron ^ 1) & 1"),
    "half of the values": ("sparse/train_masks.cu", "part < 4", "part < 2"),
    "hot neurons gathered too": ("sparse/train_masks.cu", "mask & ~marked[word]", "mask"),
    "the neuron beside a hot one": ("sparse/train_masks.cu", "? row[hot[i]]", "? row[hot[i] ^ 1]"),
    "sums of |h| of half a warp": ("sparse/train_hot_forward.cu", "distance > 0", "distance > 1"),
    "h of the neuron before": ("sparse/train_hot_backward.cu", "two[1].inner)", "two[0].inner)"),
    "gradients of gate and up exchanged": ("sparse/train_hot_backward.cu", "(TRAIN_GATED ? vectors : 0)", "0"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.slow
def test_a_planted_fault_is_caught(shim, with_fault: Callable[..., KernelSpec], name: str) -> None:
    file, old, new = FAULTS[name]
    where = "sparse/train_tokens.cu" if file.endswith(".cuh") else file
    copies = 0

    def load(spec: KernelSpec) -> Kernel:
        nonlocal copies
        if spec.file != where:
            return shim(spec)
        copies += 1
        return shim(with_fault(spec, file, old, new))

    with pytest.raises((AssertionError, DeviceError)):
        if "segment" in name:
            check_many_neurons(load)
        else:
            case = USUAL["usual"]
            kernels = case.kernels(load)
            case.check(kernels)
            check_hot(case, kernels, torch.arange(70))
    assert copies == 1


def test_what_does_not_fit_shared_memory_is_refused() -> None:
    assert TrainingShape(2048).shared(3, 4) == 2 * 4 * 3 * 4096 + 256 * 64 + 2 * 8 * 64 + 32
    assert [TrainingShape(hidden).batch(3, 227 * 1024) for hidden in (2048, 4096, 8192)] == [4, 4, 2]
    assert [TrainingShape(hidden).batch(3, 99 * 1024) for hidden in (2048, 4096, 6144)] == [2, 1, 1]
    assert (TrainingShape(5120).threads, TrainingShape(5120).vectors) == (320, 2)
    with pytest.raises(
        ConfigError, match="hidden_size 65536 needs 821312 bytes of shared memory where a CTA may have 232448"
    ):
        TrainingShape(65536).batch(3, 227 * 1024)
