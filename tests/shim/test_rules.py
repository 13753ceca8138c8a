"""The shim says so when a kernel breaks a rule that a GPU would punish late, rarely or without a word."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onekernel.device.kernel import Kernel
from onekernel.device.shim import ShimKernel
from onekernel.device.shim_build import Build, build_kernel, find_host_compiler
from onekernel.device.spec import KernelSpec, Pointer, Scalar
from onekernel.errors import CompileError, DeviceError

SHARED_BYTES = 1024


@pytest.fixture
def spec(case_root: Path) -> KernelSpec:
    return KernelSpec("broken.cu", "broken", params=(Scalar("part"), Pointer("memory", "int32", (64,))), root=case_root)


def launch(kernel: Kernel, part: int, grid: int = 1, cluster: int = 1) -> torch.Tensor:
    memory = torch.zeros(64, dtype=torch.int32)
    kernel.launch(grid, 64, [part, memory], shared_bytes=SHARED_BYTES, cluster=cluster)
    return memory


def launch_often(kernel: ShimKernel, part: int) -> None:
    """Launch in several orders: in some of them the fault may do no harm."""
    for seed in range(40):
        kernel.seed = seed
        launch(kernel, part)


def test_a_relaxed_word_guards_only_itself(shim, spec: KernelSpec) -> None:
    """x86 keeps the order of stores; the shim does not, as a GPU does not."""
    kernel = shim(spec)
    wrong = {True: 0, False: 0}
    for seed in range(60):
        kernel.seed = seed
        for release in wrong:
            wrong[release] += int(launch(kernel, 1 if release else 0, grid=2)[8])
    assert wrong[True] == 0
    assert wrong[False] > 0


def test_a_cta_does_not_end_before_its_copies(shim, spec: KernelSpec) -> None:
    with pytest.raises(DeviceError, match="CTA 0 ended while 1 bulk copies into its shared memory were on their way"):
        launch_often(shim(spec), 2)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (3, "meets at barrier 1 with"),
        (4, "all lanes must take the same path"),
        (6, "more arrivals at an mbarrier than the 2"),
        (7, "nobody initialised"),
        (8, "leaves its 1024 bytes of shared memory"),
        (9, "all must be multiples of 16"),
        (17, "thread 0 ended while 1 of its copies were on their way"),
        (18, "to offset 1024 of its 1024 bytes of shared memory"),
        (19, "which is not a multiple of 16"),
    ],
)
def test_a_broken_rule_is_named(shim, spec: KernelSpec, part: int, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        launch(shim(spec), part)


def test_a_hang_ends_and_says_who_waits(shim, spec: KernelSpec) -> None:
    with pytest.raises(
        DeviceError, match=r"did not end within 0.3 s; CTA 0 threads 0-31: barrier 2; .* 32-63: barrier 0"
    ):
        launch(shim(spec, timeout_s=0.3), 5)


def test_shared_memory_of_a_cta_that_ended(shim, spec: KernelSpec) -> None:
    with pytest.raises(DeviceError, match="CTA 1 uses the shared memory of CTA 0, which has ended"):
        launch(shim(spec), 10, grid=2, cluster=2)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (11, "AddressSanitizer: heap-buffer-overflow"),
        (12, "AddressSanitizer: heap-buffer-overflow"),
        (14, "runtime error: shift exponent"),
        (9, "all must be multiples of 16"),
    ],
)
def test_address_and_undefined_behaviour(shim, spec: KernelSpec, part: int, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        launch(shim(spec, Build.ADDRESS), part)


def test_a_read_before_the_copy_has_landed(shim, spec: KernelSpec) -> None:
    with pytest.raises(DeviceError, match="AddressSanitizer: use-after-poison"):
        launch_often(shim(spec, Build.ADDRESS), 13)


def test_threads(shim, spec: KernelSpec) -> None:
    kernel = shim(spec, Build.THREAD)
    with pytest.raises(DeviceError, match="ThreadSanitizer: data race"):
        launch(kernel, 15)
    assert torch.equal(launch(kernel, 16), torch.arange(64, dtype=torch.int32) ^ 32)


def test_a_fault_in_the_source_is_shown(shim, case_root: Path) -> None:
    (case_root / "wrong.cu").write_text(
        '#include "ptx/platform.cuh"\nextern "C" __global__ void wrong() { nothing(); }\n'
    )
    with pytest.raises(CompileError, match=r"kernel wrong does not compile for the CPU.*'?nothing'?") as caught:
        shim(KernelSpec("wrong.cu", "wrong", root=case_root))
    assert caught.value.source_path is not None and caught.value.source_path.exists()


def test_a_build_is_found_again(shim, spec: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    first = shim(spec)
    compiler = find_host_compiler()
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("a compiler was started"))
    assert build_kernel(spec, Build.PLAIN, compiler) == first._file


def test_parameters_are_compared_with_the_source(shim, case_root: Path) -> None:
    wrong = KernelSpec(
        "broken.cu", "broken", params=(Scalar("part", "i64"), Pointer("memory", "int32", (64,))), root=case_root
    )
    with pytest.raises(DeviceError, match=r"parameters of \[4, 8\] bytes, its spec states \[8, 8\]"):
        shim(wrong)
