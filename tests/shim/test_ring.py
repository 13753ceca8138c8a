"""The persistent ring kernel: right on any number of CTAs, repeatable, and wrong or stopped when a fault is planted."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from onekernel.device.kernel import Kernel
from onekernel.device.shim_build import Build
from onekernel.device.spec import KernelSpec
from onekernel.device.watch import Watch
from onekernel.errors import ConfigError, DeviceError
from onekernel.kernels.ring import RingChain, RingPhase, RingShape
from onekernel.weights.dense import PackedDense

SHAPE = RingShape(warps=2, tiles=1, stages=3)
DIMS = (200, 136, 72, 328)
"""Widths of the chain's values: multiples of 8, not of 64."""
TOKENS = 3
TURNS = 100_000

FLIPS = 2e-3
"""Relative L2 over all tokens: float32 sums differ in their last bits, and now and then a value then rounds to the
other bf16 neighbour, 2^-9 away, which the next phases carry on."""


@dataclass(frozen=True, slots=True)
class Case:
    """A chain of matrices, its first input, and what float64 makes of them with bf16 between phases."""

    matrices: list[torch.Tensor]
    first: torch.Tensor
    want: torch.Tensor

    @classmethod
    def of(cls, matrices: list[torch.Tensor], first: torch.Tensor, tokens: int = TOKENS) -> Case:
        x, rows = first.double(), []
        for _ in range(tokens):
            for matrix in matrices:
                y = matrix.double() @ x
                x = y.float().bfloat16().double()
            rows.append(y)
        return cls(matrices, first, torch.stack(rows))

    def run(self, kernel: Kernel, ctas: int, device: torch.device, shape: RingShape = SHAPE, window: int = 2, **watch):
        chain = RingChain.of([PackedDense.pack(matrix.to(device)).tiles for matrix in self.matrices])
        guard = Watch.create(device, ctas, shape.threads, **watch)
        out = chain.prepare(kernel, shape, ctas, self.first.to(device), len(self.want), guard, window).start()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        guard.check("ring")
        return out.cpu()

    def error(self, out: torch.Tensor) -> float:
        return float((out.double() - self.want).norm() / self.want.norm())


@pytest.fixture(scope="module")
def case() -> Case:
    torch.manual_seed(0)
    widths = zip(DIMS, (*DIMS[1:], DIMS[0]), strict=True)
    matrices = [(torch.randn(rows, columns) / columns**0.5).bfloat16() for columns, rows in widths]
    return Case.of(matrices, torch.randn(DIMS[0]).bfloat16())


@pytest.fixture(scope="module")
def exact_case() -> Case:
    """Small whole numbers: float32 sums are exact in any order, so every device must give the same bits."""
    torch.manual_seed(1)
    matrices = []
    for columns, rows in zip(DIMS, (*DIMS[1:], DIMS[0]), strict=True):
        matrix = torch.zeros(rows, columns)
        at = torch.stack([torch.randperm(columns)[:4] for _ in range(rows)])
        matrices.append(matrix.scatter_(1, at, torch.randint(0, 2, (rows, 4)) * 2.0 - 1).bfloat16())
    return Case.of(matrices, torch.randint(-4, 5, (DIMS[0],)).bfloat16())


@pytest.mark.parametrize("ctas", [1, 2, 3, 5])
def test_any_number_of_ctas_gives_the_same_bits(device, case: Case, ctas: int) -> None:
    kernel = device.load(SHAPE.spec())
    out = case.run(kernel, ctas, device.torch)
    assert case.error(out) < FLIPS
    assert torch.equal(out, case.run(kernel, 4, device.torch))


@pytest.mark.parametrize("ctas", [2, 5])
def test_exact_sums(device, exact_case: Case, ctas: int) -> None:
    assert torch.equal(exact_case.run(device.load(SHAPE.spec()), ctas, device.torch).double(), exact_case.want)


def test_another_shape(device, case: Case) -> None:
    shape = RingShape(warps=3, tiles=2, stages=4)
    kernel = device.load(shape.spec())
    for window in (1, shape.stages):
        assert case.error(case.run(kernel, 3, device.torch, shape, window)) < FLIPS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch sees no CUDA device")
def test_a_whole_gpu() -> None:
    """132 CTAs of 17 warps, and the same bits in every repeat."""
    from onekernel.device.cuda_kernel import load_kernel

    torch.manual_seed(2)
    sizes = [(4096, 2048), (2048, 4096), (2048, 2048)]
    case = Case.of(
        [(torch.randn(*size) / size[1] ** 0.5).bfloat16() for size in sizes], torch.randn(2048).bfloat16(), 20
    )
    shape, gpu = RingShape(), torch.device("cuda", 0)
    kernel = load_kernel(shape.spec())
    ctas = torch.cuda.get_device_properties(gpu).multi_processor_count
    runs = [case.run(kernel, ctas, gpu, shape) for _ in range(20)]
    assert case.error(runs[0]) < 2e-2  # 60 phases, each rounding to bf16
    assert all(torch.equal(run, runs[0]) for run in runs)


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_threads(shim, case: Case, seed: int) -> None:
    assert case.error(case.run(shim(SHAPE.spec(), seed=seed), 3, torch.device("cpu"))) < FLIPS


@pytest.mark.parametrize("build", [Build.ADDRESS, Build.THREAD])
def test_sanitizers_find_nothing(shim, build: Build) -> None:
    torch.manual_seed(3)
    matrices = [torch.randn(72, 136).bfloat16() / 8, torch.randn(136, 72).bfloat16() / 8]
    small = Case.of(matrices, torch.randn(136).bfloat16(), 2)
    assert small.error(small.run(shim(SHAPE.spec(), build=build), 2, torch.device("cpu"))) < FLIPS


FAULTS = {
    "dropped tag": ("ring.cu", "bf16_pair(low, high), tag);", "bf16_pair(low, high), tag - (pair == 5));"),
    "early reuse of a stage": ("tile/ring.cuh", "if (at.round > 0 && ", "if (at.round > 1000 && "),
    "early reuse of the exchange": ("ring.cu", "exchange + (step + 1) % 2 * words", "exchange + step % 2 * words"),
    "wrong stage count": ("ring.cu", "ok && source < end;", "ok && source + STAGE_BYTES < end;"),
    "missing wait for a stage": ("ring.cu", "ok = ok && ring.take(watch, at);", ""),
    "missing wait for values": (
        "ring.cu",
        "barrier_sync(CONSUMER_BARRIER, CONSUMERS);",
        "",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(shim, with_fault: Callable[..., KernelSpec], case: Case, name: str) -> None:
    """Within a few orders the result is wrong, poisoned or missing, or the kernel was stopped."""
    kernel = shim(with_fault(SHAPE.spec(), *FAULTS[name]))
    for seed in range(20):
        kernel.seed = seed
        try:
            error = case.error(case.run(kernel, 3, torch.device("cpu"), max_turns=3 * 1024))
        except DeviceError:
            return
        if not error < FLIPS:
            return
    pytest.fail(f"{name}: 20 orders gave the right result")


@pytest.mark.complaint("K5", file="kernels/tile/spin.cuh", old="turns >= watch.max_turns", new="turns > 4000000000u")
def test_a_stuck_kernel_ends_and_says_who_waited(device, with_fault, case: Case) -> None:
    """On a GPU too, and the next launch works: the context is not lost."""
    stuck = with_fault(SHAPE.spec(), *FAULTS["dropped tag"])
    with pytest.raises(DeviceError, match="kernel ring was stopped") as caught:
        case.run(device.load(stuck), 2, device.torch, max_turns=2**18)
    # The sixth word of each CTA's first phase, 5 and 36 + 5, carries tag 1 instead of 2; pairs of words are named by
    # the first. The loaders wait for consumers that are stuck.
    assert re.search(r"CTA \d warp 0 waited for value (4|40): expected 2, saw 1, gave up", str(caught.value))
    assert re.search(r"CTA \d warp 2 waited for ring stage \d to be freed", str(caught.value))
    assert case.error(case.run(device.load(SHAPE.spec()), 2, device.torch)) < FLIPS


def test_the_host_can_stop_a_kernel(shim, with_fault, case: Case) -> None:
    """What a watchdog does: set the abort word, and the launch ends though its own patience is long."""
    from threading import Timer

    kernel = shim(with_fault(SHAPE.spec(), *FAULTS["dropped tag"]))
    chain = RingChain.of([PackedDense.pack(matrix).tiles for matrix in case.matrices])
    watch = Watch.create(torch.device("cpu"), 2, SHAPE.threads, max_turns=2**32 - 1)
    Timer(0.2, watch.stop).start()
    chain.prepare(kernel, SHAPE, 2, case.first, TOKENS, watch).start()
    waits = watch.waited()
    assert waits and not any(wait.expired for wait in waits)
    with pytest.raises(DeviceError, match="was told to stop"):
        watch.check("ring")


def test_a_chain_that_does_not_close_is_refused() -> None:
    tiles = [PackedDense.pack(torch.zeros(*size)).tiles for size in ((16, 24), (24, 16))]
    chain = RingChain.of(tiles)
    with pytest.raises(ConfigError, match="takes 32 values after one of 24 rows"):
        RingChain((*chain.phases, RingPhase(offset_bytes=0, row_tiles=3, k_tiles=1, inputs=32)), chain.weights)


def test_a_window_outside_the_ring_is_refused(shim, case: Case) -> None:
    with pytest.raises(ConfigError, match="window is 4; it must be 1 to 3"):
        case.run(shim(SHAPE.spec()), 1, torch.device("cpu"), window=4)
