"""Launches, on a driver that is made up: what is passed, what is asked first, what is refused instead of hanging."""

from __future__ import annotations

import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onekernel.device import cuda_kernel
from onekernel.device.bound import CheckedBound
from onekernel.device.compile import Compiled
from onekernel.device.cubin import Resources
from onekernel.device.cuda_kernel import CudaKernel
from onekernel.device.kernel import Bound
from onekernel.device.spec import KernelSpec, Pointer, Scalar
from onekernel.errors import DeviceError
from tests.unit.device.fakes import FakeDriver, gpu

SPEC = KernelSpec(
    "k.cu",
    "k",
    params=(Pointer("x", "float32", ("n",)), Scalar("n"), Scalar("scale", "f32"), Scalar("total", "i64")),
)
COMPILED = Compiled(b"cubin", "", Resources(32, 0, 0, 0, 128), "fake", 0.0)
STREAM = SimpleNamespace(cuda_stream=7)


def kernel(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> tuple[CudaKernel, FakeDriver]:
    """A kernel on the fake driver. Its tensors are on the CPU: only the comparison of devices is told otherwise."""
    real = cuda_kernel.bind
    monkeypatch.setattr(cuda_kernel, "bind", lambda spec, device, args: real(spec, torch.device("cpu"), args))
    cuda = FakeDriver(**{"param_sizes": [8, 4, 4, 8], **answers})
    return CudaKernel(SPEC, COMPILED, gpu(), cuda), cuda


def launch(loaded: CudaKernel, grid: int = 132, block: int = 256, **changes: Any) -> torch.Tensor:
    x = torch.zeros(8)
    loaded.launch(grid, block, [x, 8, 0.5, -3], stream=STREAM, **changes)  # type: ignore[arg-type]
    return x


def test_arguments_arrive_as_the_kernel_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, cuda = kernel(monkeypatch)
    x = launch(loaded)
    assert cuda.launches == [(132, 256, struct.pack("<Qifq", x.data_ptr(), 8, 0.5, -3))]


def test_the_kernel_is_loaded_before_the_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    _, cuda = kernel(monkeypatch)
    assert cuda.calls == [("push", 1), ("load", 4), ("pop", None)]


def test_cooperative_and_cluster_launches_carry_their_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, cuda = kernel(monkeypatch, active_clusters=8)
    launch(loaded, 128, 128, cluster=16, cooperative=True, shared_bytes=200_000)
    assert ("MAX_DYNAMIC_SHARED_SIZE_BYTES", 200_000) in cuda.calls
    assert ("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1) in cuda.calls
    assert cuda.calls[-1] == (
        "launch",
        {"CU_LAUNCH_ATTRIBUTE_COOPERATIVE", "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"},
    )


def test_a_known_shape_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, cuda = kernel(monkeypatch)
    launch(loaded, shared_bytes=1000)
    before = len(cuda.calls)
    launch(loaded, shared_bytes=1000)
    assert cuda.calls[before:] == [("launch", set())]


def test_a_smaller_shape_leaves_a_larger_one_its_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only with one limit for all shapes, as the driver has it, does the second launch of the larger one say so."""
    loaded, cuda = kernel(monkeypatch)
    for shared_bytes in (100_000, 1000, 100_000):
        launch(loaded, shared_bytes=shared_bytes)
    loaded.resident_ctas(256, shared_bytes=2000)
    launch(loaded, shared_bytes=100_000)
    launch(loaded, shared_bytes=200_000)
    assert len(cuda.launches) == 5


def test_a_bound_launch_keeps_its_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, cuda = kernel(monkeypatch)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    large, small = (loaded.bind(256, [torch.zeros(8), 8, 0.5, -3], shared_bytes=size) for size in (100_000, 1000))
    for launches in (large, small, large):
        launches.launch(132)
    launch(loaded, shared_bytes=500)
    large.launch(132)
    assert len(cuda.launches) == 5


def test_another_thread_or_device_enters_the_context_first(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, cuda = kernel(monkeypatch)
    cuda.context = 0
    launch(loaded)
    assert [name for name, _ in cuda.calls[-3:]] == ["push", "launch", "pop"]


@pytest.mark.parametrize(
    ("answers", "shape", "message"),
    [
        (
            {},
            {"grid": 133, "cooperative": True},
            r"k needs 133 CTAs resident at once \(256 threads and 0 bytes .*, clusters of 1\); NVIDIA H200 with 132 "
            "SMs holds 132",
        ),
        (
            {"active_clusters": 7},
            {"grid": 128, "cluster": 16, "cooperative": True},
            "k needs 128 CTAs .* clusters of 16.* holds 112",
        ),
        ({"active_clusters": 0}, {"grid": 128, "cluster": 16}, "k needs 16 CTAs .* holds 0"),
        ({"ctas_per_sm": 0}, {}, "k needs 1 CTAs .* holds 0"),
        ({}, {"block": 257}, "k is asked for 257 threads per CTA; it was compiled for at most 256"),
        ({"static_shared_bytes": 1024}, {"shared_bytes": 232_000}, r"1024 \+ 232000 bytes .* has at most 232448"),
        ({}, {"cluster": 5}, "cluster is 5 in a grid of 132; it must divide the grid"),
        ({}, {"grid": 136, "cluster": 17}, "cluster is 17 .* be at most 16"),
        ({}, {"grid": 0}, "grid and block must be at least 1"),
    ],
)
def test_what_cannot_run_is_refused_with_numbers(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, int], shape: dict[str, Any], message: str
) -> None:
    loaded, cuda = kernel(monkeypatch, **answers)
    with pytest.raises(DeviceError, match=message):
        launch(loaded, **shape)
    assert cuda.launches == []


def test_a_device_without_clusters_or_cooperative_launches_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, _ = kernel(monkeypatch)
    loaded._facts = gpu(clusters=False, cooperative=False)
    with pytest.raises(DeviceError, match="asks for clusters of 2; NVIDIA H200"):
        launch(loaded, cluster=2)
    with pytest.raises(DeviceError, match="asks for a cooperative launch; NVIDIA H200"):
        launch(loaded, cooperative=True)


def test_what_is_resident_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, _ = kernel(monkeypatch, active_clusters=15, ctas_per_sm=2)
    assert loaded.resident_ctas(256) == 264
    assert loaded.resident_ctas(256, shared_bytes=100_000, cluster=8) == 120


def test_a_failed_launch_names_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, _ = kernel(monkeypatch, launch_status=700)
    with pytest.raises(DeviceError, match="launching kernel k failed with CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
        launch(loaded)
    assert caught.value.context_lost


@pytest.mark.parametrize("sizes", [[8, 4, 4], [8, 4, 4, 8, 8], [8, 8, 4, 8]])
def test_a_spec_that_does_not_fit_the_entry_is_refused(sizes: list[int]) -> None:
    with pytest.raises(DeviceError, match=r"compiled with parameters of \[.*\] bytes, its spec states \[8, 4, 4, 8\]"):
        CudaKernel(SPEC, COMPILED, gpu(), FakeDriver(param_sizes=sizes))


def test_an_unsupported_device_is_refused_before_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCache:
        def get(self, spec: KernelSpec) -> Compiled:
            raise AssertionError("compiled for a device that is refused")

    monkeypatch.setattr(cuda_kernel, "facts", lambda device: gpu(cuda_version=(12, 4)))
    with pytest.raises(DeviceError, match="driver"):
        cuda_kernel.load_kernel(SPEC, cache=NoCache())  # type: ignore[arg-type]


def test_the_spec_is_compiled_for_the_device_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Cache:
        def get(self, spec: KernelSpec) -> Compiled:
            asked.append(spec.arch)
            return COMPILED

    monkeypatch.setattr(cuda_kernel, "facts", lambda device: gpu(capability=(10, 0)))
    monkeypatch.setattr(cuda_kernel, "driver", lambda: FakeDriver(param_sizes=[8, 4, 4, 8]))
    loaded = cuda_kernel.load_kernel(replace(SPEC, arch="sm_90a"), cache=Cache())  # type: ignore[arg-type]
    assert asked == ["sm_100"]
    assert loaded.spec.arch == "sm_100"


def bound(loaded: CudaKernel, monkeypatch: pytest.MonkeyPatch) -> tuple[Bound, torch.Tensor]:
    """A prepared launch whose `n` and `scale` change."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    x = torch.zeros(8)
    return loaded.bind(256, [x, 8, 0.5, -3], shared_bytes=1000, changing=("scale", "total")), x


def test_a_bound_launch_gives_new_numbers_to_old_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, cuda = kernel(monkeypatch)
    launches, x = bound(loaded, monkeypatch)
    launches.launch(132, 0.25, 5)
    launches.launch(3, 2.0, -1)
    address = x.data_ptr()
    assert cuda.launches == [
        (132, 256, struct.pack("<Qifq", address, 8, 0.25, 5)),
        (3, 256, struct.pack("<Qifq", address, 8, 2.0, -1)),
    ]


def test_a_bound_launch_is_configured_once_for_all_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, cuda = kernel(monkeypatch)
    launches, _ = bound(loaded, monkeypatch)
    launches.launch(1, 0.25, 5)
    before = len(cuda.calls)
    for grid in range(2, 10):
        launches.launch(grid, 0.25, 5)
    assert cuda.calls[before:] == [("launch", set())] * 8
    launch(loaded, 1, shared_bytes=1000)  # a plain launch has a grid of its own
    assert [grid for grid, _, _ in cuda.launches[-2:]] == [9, 1]


def test_a_bound_launch_checks_what_it_is_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, cuda = kernel(monkeypatch)
    x = torch.zeros(8)
    with pytest.raises(DeviceError, match="n of kernel k has value 9, but n is 8"):
        loaded.bind(256, [x, 9, 0.5, -3])
    with pytest.raises(DeviceError, match="kernel k has no number 'x'; it has n, scale, total"):
        loaded.bind(256, [x, 8, 0.5, -3], changing=("x",))
    launches, _ = bound(loaded, monkeypatch)
    for numbers in ((0.5,), (0.5, 2**63), (0.5, 0.5)):
        with pytest.raises(DeviceError, match="kernel k is launched with the numbers"):
            launches.launch(1, *numbers)
    cuda.launch_status = 700
    with pytest.raises(DeviceError, match="launching kernel k failed") as caught:
        launches.launch(1, 0.5, 1)
    assert caught.value.context_lost


def test_a_bound_launch_on_the_shim_checks_the_count_of_numbers() -> None:
    class Recorder:
        spec = SPEC

        def __init__(self) -> None:
            self.seen: list[Any] = []

        def launch(self, grid: int, block: int, args: Any, **options: Any) -> None:
            self.seen.append((grid, block, list(args), options))

    recorder = Recorder()
    launches = CheckedBound(recorder, 64, [torch.zeros(8), 8, 0.5, -3], 16, ("total",))
    launches.launch(5, 11)
    [(grid, block, args, options)] = recorder.seen
    assert (grid, block, args[1:], options) == (5, 64, [8, 0.5, 11], {"shared_bytes": 16})
    with pytest.raises(DeviceError, match="launched with 2 numbers, not 1"):
        launches.launch(5, 1, 2)
