"""A compiled kernel on a GPU: loaded whole, launched in microseconds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from onekernel.device.arguments import bind
from onekernel.device.bound import ArgumentSlots, CudaBound
from onekernel.device.cache import KernelCache, default_cache
from onekernel.device.compile import Compiled
from onekernel.device.driver import check, current, driver, is_current
from onekernel.device.facts import DeviceFacts, facts
from onekernel.device.kernel import Arg
from onekernel.device.launch import LaunchShape, Prepared, check_resident, prepare
from onekernel.device.spec import KernelSpec, Param, Pointer, Scalar
from onekernel.device.support import OPERATOR_ARCHITECTURES, architecture, check_operator, check_supported
from onekernel.errors import DeviceError

_SIZES = {"i32": 4, "u32": 4, "i64": 8, "u64": 8, "f32": 4}


class CudaKernel:
    """One entry of one cubin in the primary context of one device, which torch uses too. See `kernel.Kernel`."""

    def __init__(self, spec: KernelSpec, compiled: Compiled, found: DeviceFacts, cuda: Any = None) -> None:
        self.spec = spec
        self.compiled = compiled
        self.device = torch.device("cuda", found.index)
        self._facts = found
        self._cuda = cuda = cuda or driver()
        self._slots = ArgumentSlots(spec)
        self._lock = threading.Lock()
        handle = check(cuda.cuDeviceGet(found.index), f"opening {self.device}", cuda)
        self._context = check(cuda.cuDevicePrimaryCtxRetain(handle), f"opening {self.device}", cuda)
        self._prepared: dict[tuple[LaunchShape, int], Prepared] = {}
        self._configs: dict[tuple[LaunchShape, int], Any] = {}  # of bound launches, with the grid of the last one
        with current(self._context, cuda):
            self._function = self._load()

    def launch(
        self,
        grid: int,
        block: int,
        args: Sequence[Arg],
        *,
        shared_bytes: int = 0,
        cluster: int = 1,
        cooperative: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Start the kernel; see `kernel.Kernel.launch`.

        With eight arguments a launch of a known shape took 16 us of the host's time beside an H200: 8 to check the
        arguments, 4 in the driver.
        """
        values = bind(self.spec, self.device, args)
        handle = torch._C._cuda_getCurrentRawStream(self.device.index) if stream is None else stream.cuda_stream
        shape = LaunchShape(grid, block, shared_bytes, cluster, cooperative)
        cuda = self._cuda
        if is_current(self._context, cuda):
            self._start(shape, handle, values)
        else:
            with current(self._context, cuda):
                self._start(shape, handle, values)

    def bind(
        self, block: int, args: Sequence[Arg], *, shared_bytes: int = 0, changing: Sequence[str] = ()
    ) -> CudaBound:
        """Prepare launches; see `kernel.BindableKernel.bind`."""
        values = bind(self.spec, self.device, args)

        def configure(stream: int) -> Any:
            # The grid is set at each launch: without clusters and cooperation nothing else depends on it.
            shape = LaunchShape(1, block, shared_bytes)
            if (shape, stream) not in self._configs:
                with current(self._context, self._cuda):
                    self._configs[shape, stream] = self._prepare_resident(shape, stream).config
            return self._configs[shape, stream]

        return CudaBound(
            self.spec, args, values, changing, self._function, self._cuda, self.device, self._lock, configure
        )

    def resident_ctas(self, block: int, *, shared_bytes: int = 0, cluster: int = 1) -> int:
        """Return how many CTAs of this shape the device holds at once; with clusters it differs from chip to chip."""
        shape = LaunchShape(cluster, block, shared_bytes, cluster)
        with current(self._context, self._cuda):
            return self._prepare(shape, 0).resident_ctas

    def _start(self, shape: LaunchShape, stream: int, values: list[int | float | bytes]) -> None:
        prepared = self._prepared.get((shape, stream))
        if prepared is None:
            prepared = self._prepared[shape, stream] = self._prepare_resident(shape, stream)
        with self._lock:  # the slots are free again when the call returns: the driver has copied them
            self._slots.fill(values)
            result = self._cuda.cuLaunchKernelEx(prepared.config, self._function, self._slots.address, 0)
        check(result, f"launching kernel {self.spec.entry}", self._cuda)

    def _prepare_resident(self, shape: LaunchShape, stream: int) -> Prepared:
        prepared = self._prepare(shape, stream)
        check_resident(self.spec.entry, shape, prepared.resident_ctas, self._facts)
        return prepared

    def _prepare(self, shape: LaunchShape, stream: int) -> Prepared:
        with self._lock:  # it raises a limit of the function from what another thread may be raising
            return prepare(self.spec.entry, self._function, shape, stream, self._facts, self._cuda)

    def _load(self) -> Any:
        """Load the cubin and finish it now: a lazy load at the first launch would wait for a running kernel to end."""
        cuda, entry = self._cuda, self.spec.entry
        doing = f"loading kernel {entry}"
        self._library = check(cuda.cuLibraryLoadData(self.compiled.cubin, [], [], 0, [], [], 0), doing, cuda)
        kernel = check(cuda.cuLibraryGetKernel(self._library, entry.encode()), doing, cuda)
        self._check_params(kernel)
        function = check(cuda.cuKernelGetFunction(kernel), doing, cuda)
        check(cuda.cuFuncLoad(function), doing, cuda)
        return function

    def _check_params(self, kernel: Any) -> None:
        """Compare `spec.params` with the compiled entry: a forgotten parameter would read past the arguments."""
        expected = [_size(param) for param in self.spec.params]
        sizes: list[int] = []
        while len(sizes) <= len(expected):
            status, _, size = self._cuda.cuKernelGetParamInfo(kernel, len(sizes))
            if int(status) != 0:
                break
            sizes.append(int(size))
        if sizes != expected:
            raise DeviceError(
                f"kernel {self.spec.entry} was compiled with parameters of {sizes} bytes, its spec states {expected}; "
                f"correct the params of the spec"
            )


def load_kernel(spec: KernelSpec, device: str = "cuda", cache: KernelCache | None = None) -> CudaKernel:
    """Compile (or find in the cache) and load a kernel for a device, for that device's own architecture.

    Raises DeviceError for an unsupported device or driver, before compiling, and CompileError for a faulty source.
    """
    found = facts(device)
    check_supported(found)
    spec = replace(spec, arch=architecture(found))
    return CudaKernel(spec, (cache or default_cache()).get(spec), found)


def load_operator(spec: KernelSpec, device: str = "cuda", cache: KernelCache | None = None) -> CudaKernel:
    """Do as `load_kernel` for an operator's kernel, which also runs on GPUs that the megakernel does not."""
    found = facts(device)
    check_operator(found)
    spec = replace(spec, arch=architecture(found, OPERATOR_ARCHITECTURES))
    return CudaKernel(spec, (cache or default_cache()).get(spec), found)


def _size(param: Param) -> int:
    if isinstance(param, Pointer):
        return 8
    return _SIZES[param.kind] if isinstance(param, Scalar) else param.size
