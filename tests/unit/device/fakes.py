"""A CUDA driver and GPU facts without a GPU: the real structures of cuda-bindings, made-up answers."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest

from onekernel.device.facts import DeviceFacts

real = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings exist for Linux and Windows only")

H200 = DeviceFacts(
    index=0,
    name="NVIDIA H200",
    uuid="GPU-00000000-0000-0000-0000-000000000000",
    capability=(9, 0),
    sm_count=132,
    shared_bytes_per_block=232_448,
    shared_bytes_per_sm=233_472,
    l2_bytes=60 * 2**20,
    memory_bytes=140 * 2**30,
    driver_version="580.82.07",
    cuda_version=(13, 0),
    exec_timeout=False,
    mig=False,
    cooperative=True,
    clusters=True,
    prohibited=False,
)


def gpu(**changes: Any) -> DeviceFacts:
    return replace(H200, **changes)


class FakeDriver:
    """Answers what a driver would; what is launched is in `launches` as (grid, block, arguments' bytes)."""

    def __init__(self, **answers: Any) -> None:
        self.device_attributes = {
            "COMPUTE_CAPABILITY_MAJOR": 9,
            "COMPUTE_CAPABILITY_MINOR": 0,
            "MULTIPROCESSOR_COUNT": 132,
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232_448,
            "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233_472,
            "L2_CACHE_SIZE": 60 * 2**20,
            "KERNEL_EXEC_TIMEOUT": 0,
            "COOPERATIVE_LAUNCH": 1,
            "CLUSTER_LAUNCH": 1,
            "COMPUTE_MODE": 0,
        }
        self.name = b"NVIDIA H200"
        self.count = 1
        self.version = 13000
        self.init_status = 0
        self.launch_status = 0
        self.max_threads = 256
        self.static_shared_bytes = 0
        self.max_dynamic_shared_bytes = 48 * 1024  # until the function is allowed more, or less
        self.ctas_per_sm = 1
        self.active_clusters = 15
        self.param_sizes: list[int] = []
        self.context = 1
        self.calls: list[tuple[str, Any]] = []
        self.launches: list[tuple[int, int, bytes]] = []
        for name, value in answers.items():
            (self.device_attributes if name in self.device_attributes else self.__dict__)[name] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu"):
            raise AttributeError(f"the fake driver has no {name}")
        return getattr(real, name)

    def cuInit(self, flags: int) -> tuple[int]:
        return (self.init_status,)

    def cuGetErrorString(self, status: Any) -> tuple[int, bytes]:
        return (0, b"made up")

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return (0, self.count)

    def cuDeviceGet(self, index: int) -> tuple[int, int]:
        return (0, index)

    def cuDeviceGetName(self, size: int, device: int) -> tuple[int, bytes]:
        return (0, (self.name + b"\0").ljust(size, b" "))

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return (0, self.version)

    def cuDeviceGetUuid(self, device: int) -> tuple[int, Any]:
        return (0, real.CUuuid())

    def cuDeviceTotalMem(self, device: int) -> tuple[int, int]:
        return (0, 140 * 2**30)

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> tuple[int, int]:
        return (0, self.device_attributes[attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")])

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
        return (0, 1)

    def cuCtxGetCurrent(self) -> tuple[int, int]:
        return (0, self.context)

    def cuCtxPushCurrent(self, context: int) -> tuple[int]:
        self.calls.append(("push", context))
        return (0,)

    def cuCtxPopCurrent(self) -> tuple[int, int]:
        self.calls.append(("pop", None))
        return (0, 1)

    def cuLibraryLoadData(self, cubin: bytes, *options: Any) -> tuple[int, int]:
        return (0, 2)

    def cuLibraryGetKernel(self, library: int, name: bytes) -> tuple[int, int]:
        return (0, 3)

    def cuKernelGetFunction(self, kernel: int) -> tuple[int, int]:
        return (0, 4)

    def cuFuncLoad(self, function: int) -> tuple[int]:
        self.calls.append(("load", function))
        return (0,)

    def cuKernelGetParamInfo(self, kernel: int, index: int) -> tuple[int, int, int]:
        return (0, 8 * index, self.param_sizes[index]) if index < len(self.param_sizes) else (1, 0, 0)

    def cuFuncGetAttribute(self, attribute: Any, function: int) -> tuple[int, int]:
        known = {
            "MAX_THREADS_PER_BLOCK": self.max_threads,
            "SHARED_SIZE_BYTES": self.static_shared_bytes,
            "MAX_DYNAMIC_SHARED_SIZE_BYTES": self.max_dynamic_shared_bytes,
        }
        return (0, known[attribute.name.removeprefix("CU_FUNC_ATTRIBUTE_")])

    def cuFuncSetAttribute(self, function: int, attribute: Any, value: int) -> tuple[int]:
        name = attribute.name.removeprefix("CU_FUNC_ATTRIBUTE_")
        self.calls.append((name, value))
        if name == "MAX_DYNAMIC_SHARED_SIZE_BYTES":
            self.max_dynamic_shared_bytes = value
        return (0,)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function: int, block: int, shared: int) -> tuple[int, int]:
        return (0, self.ctas_per_sm)

    def cuOccupancyMaxActiveClusters(self, function: int, config: Any) -> tuple[int, int]:
        return (0, self.active_clusters)

    def cuLaunchKernelEx(self, config: Any, function: int, addresses: int, extra: int) -> tuple[int]:
        self.calls.append(("launch", {attribute.id.name for attribute in config.attrs}))
        if config.sharedMemBytes > self.max_dynamic_shared_bytes:  # the limit of the moment, whatever was prepared
            return (int(real.CUresult.CUDA_ERROR_INVALID_VALUE),)
        pointers = (ctypes.c_void_p * len(self.param_sizes)).from_address(addresses)
        data = b"".join(
            ctypes.string_at(pointer, size) for pointer, size in zip(pointers, self.param_sizes, strict=True)
        )
        self.launches.append((config.gridDimX, config.blockDimX, data))
        return (self.launch_status,)
