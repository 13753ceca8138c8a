"""The device layer on a real GPU: what the fakes of tests/unit/device stand for."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from onekernel.device.cache import KernelCache
from onekernel.device.compile import compiler_runs, mark_ready, refuse_late_compiles
from onekernel.device.cuda_kernel import CudaKernel, load_kernel
from onekernel.device.describe import describe
from onekernel.device.facts import facts
from onekernel.device.nvcc import NvccCompiler
from onekernel.device.resolve import resolve_device
from onekernel.device.toolkit import find_nvcc
from onekernel.errors import DeviceError
from onekernel.kernels.registry import SELFCHECK

THREADS = 256
SHARED_BYTES = 4 * THREADS


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> KernelCache:
    return KernelCache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def kernel(cache: KernelCache) -> CudaKernel:
    return load_kernel(SELFCHECK, "cuda:0", cache)


class Case:
    """Inputs and outputs of one launch, the outputs poisoned."""

    def __init__(self, ctas: int, n: int = 100_003) -> None:
        self.x, self.y = torch.rand(2, n, device="cuda").unbind()
        self.x, self.y = self.x.clone(), self.y.clone()
        self.out = torch.full((n,), torch.nan, device="cuda")
        self.elements = torch.full((ctas,), -1, dtype=torch.int32, device="cuda")
        self.place = torch.full((ctas,), -1, dtype=torch.int32, device="cuda")
        self.args = [self.x, self.y, self.out, self.elements, self.place, n, ctas, 0.5]

    def check(self, cluster: int = 1) -> None:
        torch.testing.assert_close(self.out, 0.5 * self.x + self.y)
        assert self.elements.sum() == self.out.numel()
        assert self.elements.min() > 0
        ranks = torch.arange(len(self.place), dtype=torch.int32, device="cuda") % cluster
        assert torch.equal(self.place, 256 * cluster + ranks)


def test_facts_agree_with_torch() -> None:
    found, known = facts("cuda:0"), torch.cuda.get_device_properties(0)
    assert found.name == known.name
    assert found.capability == (known.major, known.minor)
    assert found.sm_count == known.multi_processor_count
    assert found.memory_bytes == known.total_memory
    assert found.l2_bytes == known.L2_cache_size
    assert found.shared_bytes_per_block == known.shared_memory_per_block_optin
    assert found.shared_bytes_per_sm == known.shared_memory_per_multiprocessor
    assert found.uuid.removeprefix("GPU-") == str(known.uuid)
    assert found.cooperative
    assert found.driver_version != "unknown"
    assert resolve_device("auto").device == "cuda:0"


def test_env_describes_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    rows = describe()
    assert dict(rows)["cuda:0 kernels"] == "supported"
    with capsys.disabled():
        print("", *(f"  {name:26} {value}" for name, value in rows), sep="\n")


@pytest.mark.parametrize("cooperative", [False, True])
@pytest.mark.parametrize("cluster", [1, 2, 8, 16])
def test_a_launch_does_what_was_asked(kernel: CudaKernel, cluster: int, cooperative: bool) -> None:
    resident = kernel.resident_ctas(THREADS, shared_bytes=SHARED_BYTES, cluster=cluster)
    ctas = min(resident, 112) // cluster * cluster
    case = Case(ctas)
    kernel.launch(ctas, THREADS, case.args, shared_bytes=SHARED_BYTES, cluster=cluster, cooperative=cooperative)
    case.check(cluster)


def test_much_shared_memory_is_opted_into(kernel: CudaKernel) -> None:
    shared_bytes = facts("cuda:0").shared_bytes_per_block
    case = Case(facts("cuda:0").sm_count)
    kernel.launch(len(case.place), THREADS, case.args, shared_bytes=shared_bytes, cooperative=True)
    case.check()


def test_a_smaller_launch_leaves_a_larger_one_its_shared_memory(kernel: CudaKernel) -> None:
    most = facts("cuda:0").shared_bytes_per_block
    for shared_bytes in (most, SHARED_BYTES, most):
        case = Case(64)
        kernel.launch(64, THREADS, case.args, shared_bytes=shared_bytes)
        case.check()


def test_what_cannot_be_resident_is_refused(kernel: CudaKernel, capsys: pytest.CaptureFixture[str]) -> None:
    shared_bytes = facts("cuda:0").shared_bytes_per_block
    held = {
        cluster: kernel.resident_ctas(THREADS, shared_bytes=shared_bytes, cluster=cluster)
        for cluster in (1, 2, 4, 8, 16)
    }
    with capsys.disabled():
        print(f"\n  CTAs resident with {shared_bytes} bytes each, by cluster size: {held}")
    assert held[1] == facts("cuda:0").sm_count
    for cluster, resident in held.items():
        case = Case(resident + cluster)
        with pytest.raises(DeviceError, match=f"needs {resident + cluster} CTAs .* holds {resident}"):
            kernel.launch(
                resident + cluster, THREADS, case.args, shared_bytes=shared_bytes, cluster=cluster, cooperative=True
            )


def test_another_stream_and_another_thread(kernel: CudaKernel) -> None:
    case, stream = Case(64), torch.cuda.Stream()
    torch.cuda.synchronize()

    def work() -> None:  # a new thread has no CUDA context until the launch enters one
        kernel.launch(64, THREADS, case.args, shared_bytes=SHARED_BYTES, stream=stream)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    stream.synchronize()
    case.check()

    case = Case(64)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        kernel.launch(64, THREADS, case.args, shared_bytes=SHARED_BYTES)
        copy = case.out.clone()
    stream.synchronize()
    torch.testing.assert_close(copy, 0.5 * case.x + case.y)


def test_threads_do_not_mix_their_arguments(kernel: CudaKernel) -> None:
    cases = [Case(64, n=64 * THREADS) for _ in range(8)]
    torch.cuda.synchronize()

    def work(case: Case) -> None:
        for _ in range(50):
            kernel.launch(64, THREADS, case.args, shared_bytes=SHARED_BYTES)

    threads = [threading.Thread(target=work, args=(case,)) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for case in cases:
        case.check()


def test_what_nvcc_makes_runs_as_well(cache: KernelCache) -> None:
    if find_nvcc() is None:
        pytest.skip("no nvcc on PATH")
    found = facts("cuda:0")
    loaded = CudaKernel(SELFCHECK, cache.get(SELFCHECK, NvccCompiler()), found)
    case = Case(64)
    loaded.launch(64, THREADS, case.args, shared_bytes=SHARED_BYTES)
    case.check()


def test_a_second_start_runs_no_compiler(kernel: CudaKernel, cache: KernelCache) -> None:
    runs, began = compiler_runs(), time.perf_counter()
    mark_ready()
    try:
        with refuse_late_compiles():
            again = load_kernel(SELFCHECK, "cuda:0", KernelCache(cache.root))
    finally:
        mark_ready(False)
    seconds = time.perf_counter() - began
    assert compiler_runs() == runs
    assert again.compiled == kernel.compiled
    assert seconds < 1
    case = Case(64)
    again.launch(64, THREADS, case.args, shared_bytes=SHARED_BYTES)
    case.check()


def test_a_launch_can_be_captured_in_a_graph(kernel: CudaKernel) -> None:
    case = Case(64)
    kernel.launch(64, THREADS, case.args, shared_bytes=SHARED_BYTES, cooperative=True)
    case.out.fill_(torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch(64, THREADS, case.args, shared_bytes=SHARED_BYTES, cooperative=True)
    graph.replay()
    case.check()


def test_a_launch_costs_microseconds(kernel: CudaKernel, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight arguments, five of them tensors, all checked each time."""
    case = Case(132, n=132 * THREADS)

    def launch_us(cooperative: bool, repeats: int = 200) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            kernel.launch(132, THREADS, case.args, shared_bytes=SHARED_BYTES, cooperative=cooperative)
        return (time.perf_counter() - began) / repeats * 1e6

    figures = {kind: sorted(launch_us(kind) for _ in range(20)) for kind in (False, True)}
    with capsys.disabled():
        for kind, samples in figures.items():
            print(
                f"\n  launch{', cooperative' * kind}: {samples[0]:.1f} us at best, {samples[10]:.1f} us median", end=""
            )
        print()
    assert figures[False][0] < 50


LOSE_THE_CONTEXT = """
import sys
from pathlib import Path
import torch
from onekernel.device.cuda_kernel import load_kernel
from onekernel.device.spec import KernelSpec, Pointer
from onekernel.device.toolkit import find_nvcc
from onekernel.errors import DeviceError
params = (Pointer("out", "int32", (32,)),)
kernel = load_kernel(KernelSpec("illegal.cu", "illegal", params=params, root=Path(sys.argv[1])))
out = torch.zeros(32, dtype=torch.int32, device="cuda")
kernel.launch(1, 32, [out])
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print("torch:", str(error).splitlines()[0])
try:
    kernel.launch(1, 32, [out])
except DeviceError as error:
    print(error.context_lost, error)
"""


def test_a_lost_context_is_named() -> None:
    """In a process of its own: nothing on the GPU works after an illegal access."""
    command = [sys.executable, "-c", LOSE_THE_CONTEXT, str(Path(__file__).parent / "kernels")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    expected = "True launching kernel illegal failed with CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access"
    assert expected in done.stdout, done.stdout + done.stderr
