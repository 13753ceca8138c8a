"""The kernels of the sparse feed-forward against float32, at small odd shapes and with rows made to break them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from onekernel.device.kernel import Kernel
from onekernel.device.shim_build import Build
from onekernel.device.spec import KernelSpec
from onekernel.errors import ConfigError, DeviceError
from onekernel.kernels import sparse_ffn
from onekernel.kernels.sparse_ffn import GATHERED, OVERFLOWED, PACKED, SLICED, Slices, SparseKernels, SparseShape
from onekernel.weights.twell import Twell, gated_product

ROUNDED = 4e-3
"""Relative L2: the result is rounded to bf16 (1.7e-3); where dense neurons come first it is rounded twice."""

GATED = SparseShape(up_warps=2, down_warps=2, pack_warps=2, gather_warps=2)
SQUARED = replace(GATED, activation="relu2")
PLAIN = replace(GATED, gated=False, activation="relu2")
WIDE = replace(GATED, up_columns=128)

Load = Callable[[KernelSpec], Kernel]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory that nobody wrote holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True, slots=True)
class Case:
    """A feed-forward and its gate's values; about one in ten of them is above zero."""

    shape: SparseShape
    x: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def random(cls, shape: SparseShape, tokens: int, hidden: int, inner: int, fraction: float = 0.1) -> Case:
        torch.manual_seed(tokens * hidden + inner)
        size = torch.rand(tokens, inner) + 0.1
        gate = torch.where(torch.rand(tokens, inner) < fraction, size, -size).bfloat16()
        up, down = torch.randn(inner, hidden) / hidden**0.5, torch.randn(inner, hidden) / inner**0.5
        return cls(shape, torch.randn(tokens, hidden).bfloat16(), gate, up.bfloat16(), down.bfloat16())

    @property
    def positive(self) -> torch.Tensor:
        return F.relu(self.gate)

    def want(self, first: int = 0) -> torch.Tensor:
        """What the neurons from `first` on give, in float32 from the packed reference."""
        packed = Twell.pack(self.positive[:, first:].contiguous(), 256)
        up = self.up[first:] if self.shape.gated else None
        activate = (lambda v: F.relu(v).square()) if self.shape.activation == "relu2" else F.relu
        return gated_product(packed, self.x, up, self.down[first:], activate)

    def sliced(self, load: Load, slices: Slices, sms: int = 3, on: torch.device | str = "cpu") -> Result:
        kernels = SparseKernels(self.shape, load, sms)
        x, gate, up, down = (tensor.to(on) for tensor in (self.x, self.gate, self.up, self.down))
        totals = torch.zeros(4, dtype=torch.int32, device=on)
        out = torch.full_like(x, torch.nan)
        if slices.first:
            out = (self.want() - self.want(slices.first)).bfloat16().to(on)
        kernels.sliced(x, gate, up, down, slices, totals, out, accumulate=slices.first > 0)
        return Result(out.cpu(), totals.tolist())


@dataclass(frozen=True, slots=True)
class Result:
    out: torch.Tensor
    totals: list[int]


def error(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.double() - want.double()).norm() / want.double().norm())


def plan(case: Case, first: int = 0, capacity: int = 64, shared_bytes: int = 1 << 17) -> Slices:
    hidden, inner = case.x.shape[1], case.gate.shape[1]
    return Slices.plan(case.shape, hidden, inner, first=first, capacity=capacity, shared_bytes=shared_bytes)


CASES: dict[str, tuple[SparseShape, tuple[int, int, int], int, int, tuple[int, int]]] = {
    "one tile": (GATED, (19, 64, 208), 0, 1 << 17, (1, 16)),
    "three tiles, some dense": (GATED, (37, 128, 208), 16, 8192, (3, 16)),
    "one token, two tiles": (GATED, (1, 64, 1040), 0, 1 << 17, (2, 16)),
    "squared": (SQUARED, (17, 64, 208), 0, 1 << 17, (1, 16)),
    "half the columns": (GATED, (9, 64, 400), 0, 6500, (9, 8)),
    "no gate": (PLAIN, (37, 64, 400), 0, 1 << 17, (1, 16)),
    "no gate, some dense, half the columns": (PLAIN, (16, 64, 400), 64, 6500, (1, 8)),
    "wide slices": (WIDE, (23, 128, 304), 0, 1 << 17, (1, 16)),
}
"""Shape, (tokens, hidden, inner), dense neurons, shared memory, and the tiles and columns that follow."""


@pytest.mark.parametrize("name", CASES)
def test_sliced_is_float32(device, name: str) -> None:
    shape, sizes, first, shared_bytes, laid_out = CASES[name]
    case = Case.random(shape, *sizes)
    slices = plan(case, first, shared_bytes=shared_bytes)
    assert (slices.tiles, slices.down_columns) == laid_out
    got = case.sliced(device.load, slices, on=device.torch)
    assert error(got.out, case.want()) < ROUNDED
    assert got.totals == [int((case.gate[:, first:] > 0).sum()), 0, 0, sizes[0]]


@pytest.mark.parametrize("shape", [GATED, SQUARED, PLAIN])
def test_gather_is_float32(device, shape: SparseShape) -> None:
    case = Case.random(shape, 5, 192, 1040)
    case.gate[2], case.gate[3] = 1.0, -1.0
    out = torch.full_like(case.x, torch.nan, device=device.torch)
    totals = torch.zeros(4, dtype=torch.int32, device=device.torch)
    tensors = [tensor.to(device.torch) for tensor in (case.x, case.gate, case.up, case.down)]
    SparseKernels(shape, device.load, 3).gather(*tensors, totals, out)
    assert error(out.cpu(), case.want()) < ROUNDED
    assert totals[GATHERED] == 5
    assert not out[3].any()


@pytest.mark.parametrize("first", [0, 64])
def test_rows_that_do_not_fit_are_rescued(device, first: int) -> None:
    """A full row at position 0, 600 nonzeros in one tile, one more than fits, and rows that just fit or are empty."""
    case = Case.random(GATED, 21, 64, 1040, fraction=0.01)
    slices = plan(case, first, capacity=32)
    case.gate[:6] = -1.0
    case.gate[0] = 0.75
    case.gate[1, 200:800] = 0.5
    case.gate[2, 300:333], case.gate[3, 300:332] = 0.5, 0.5
    case.gate[5, first] = 2.0
    got = case.sliced(device.load, slices, on=device.torch)
    assert error(got.out, case.want()) < ROUNDED
    for row in (0, 1, 2, 3, 5):
        assert error(got.out[row], case.want()[row]) < 2 * ROUNDED
    assert got.totals[OVERFLOWED] == got.totals[GATHERED] == 3
    assert got.totals[PACKED] == int((case.gate[3:, first:] > 0).sum())
    assert got.totals[SLICED] == 21


def test_any_number_of_ctas_gives_the_same_bits(device) -> None:
    case = Case.random(GATED, 150, 64, 208)
    case.gate[7] = 1.0
    runs = [case.sliced(device.load, plan(case, capacity=48), sms=sms, on=device.torch) for sms in (1, 2, 7)]
    assert all(torch.equal(run.out, runs[0].out) and run.totals == runs[0].totals for run in runs)
    assert runs[0].totals[GATHERED] == 1


def test_many_tokens_are_done_in_turns(device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.random(GATED, 37, 64, 208)
    case.gate[30] = 1.0
    whole = case.sliced(device.load, plan(case), on=device.torch)
    monkeypatch.setattr(sparse_ffn, "PARTIAL_BYTES", 16 * 4 * 64)
    turns = case.sliced(device.load, plan(case), on=device.torch)
    assert torch.equal(turns.out, whole.out)
    assert turns.totals == whole.totals


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(device, value: float) -> None:
    case = Case.random(GATED, 11, 64, 208)
    case.gate[4, 17] = value
    got = case.sliced(device.load, plan(case), on=device.torch)
    assert not got.out[4].isfinite().all()
    others = [row for row in range(11) if row != 4]
    assert error(got.out[others], case.want()[others]) < ROUNDED


@pytest.mark.parametrize("shape", [GATED, PLAIN])
def test_the_dense_product_in_one_pass(device, shape: SparseShape) -> None:
    """Of the first columns of a wider gate."""
    case = Case.random(shape, 7, 64, 208)
    up = torch.randn(7, 48).bfloat16().to(device.torch)
    want = F.relu(case.gate[:, :48].float())
    want = want * up.cpu().float() if shape.gated else want.square()
    got = SparseKernels(shape, device.load, 2).product(case.gate.to(device.torch), up)
    assert torch.equal(got.cpu(), want.bfloat16())


@pytest.mark.parametrize("shape", [GATED, PLAIN])
def test_sanitizers_find_nothing(shim, shape: SparseShape) -> None:
    case = Case.random(shape, 11, 64, 112)
    case.gate[10] = 1.0
    got = case.sliced(lambda spec: shim(spec, build=Build.ADDRESS), plan(case, capacity=32, shared_bytes=12000), sms=2)
    assert error(got.out, case.want()) < ROUNDED
    assert got.totals[GATHERED] == 1


FAULTS = {
    "one more than fits": ("sparse/pack.cu", "over || count > capacity", "over || count > capacity + 1"),
    "no mark": ("sparse/pack.cu", "overflowed[row] = over;", "overflowed[row] = 0;"),
    "a word that means nothing": ("sparse/up.cu", "entry + 1 < count ?", "true ?"),
    "weights and inputs in other orders": ("sparse/up.cu", "from[one] :", "from[t] :"),
    "a slice left out": ("sparse/combine.cu", "u32 slice = 0; slice", "u32 slice = 1; slice"),
    "other tokens' columns": ("sparse/down.cu", "group == half + j);", "group >= half + j);"),
    "only the first step": ("sparse/down.cu", "word = next;", "word = zero;"),
    "sums of the row before": ("sparse/gather.cu", "sums[i] = 0.0f;", ";"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.slow
def test_a_planted_fault_is_caught(shim, with_fault: Callable[..., KernelSpec], name: str) -> None:
    file, old, new = FAULTS[name]
    build = Build.ADDRESS if "means nothing" in name else Build.PLAIN  # it would end this process
    faulty: list[KernelSpec] = []

    def load(spec: KernelSpec) -> Kernel:
        if spec.file == file:
            spec = with_fault(spec, file, old, new)
            faulty.append(spec)
        return shim(spec, build=build)

    case = Case.random(GATED, 13, 128, 208)
    case.gate[3], case.gate[4], case.gate[5] = 1.0, 1.0, -1.0
    case.gate[5, 20:69] = 1.0
    try:
        got = case.sliced(load, plan(case, capacity=48), sms=1)
        assert not error(got.out, case.want()) < ROUNDED
    except DeviceError:
        pass
    assert len(faulty) == 1


@pytest.mark.parametrize(
    ("inner", "first", "shared_bytes", "tiles", "tile_columns", "down_columns"),
    [
        (5632, 0, sparse_ffn.SHARED_BYTES, 4, 1408, 16),
        (8192, 0, sparse_ffn.SHARED_BYTES, 5, 1648, 8),
        (8192, 1024, sparse_ffn.SHARED_BYTES, 4, 1792, 16),
        (14336, 0, sparse_ffn.SHARED_BYTES, 8, 1792, 8),
        (208, 192, 4096, 1, 16, 16),
    ],
)
def test_slices_of_published_shapes(
    inner: int, first: int, shared_bytes: int, tiles: int, tile_columns: int, down_columns: int
) -> None:
    slices = Slices.plan(SparseShape(), 2048, inner, first=first, shared_bytes=shared_bytes)
    assert (slices.tiles, slices.tile_columns, slices.down_columns) == (tiles, tile_columns, down_columns)
    assert tiles * tile_columns >= inner - first > (tiles - 1) * tile_columns
    assert tile_columns * 128 <= shared_bytes


def test_shapes_that_cannot_be_sliced_are_refused() -> None:
    with pytest.raises(ConfigError, match="20480 sparse neurons do not fit: 232448 bytes"):
        Slices.plan(SparseShape(), 4096, 20480)
    for first in (8, 208):
        with pytest.raises(ConfigError, match=f"{first} dense neurons of 208; give a multiple of 16 below"):
            Slices.plan(SparseShape(), 64, 208, first=first)
