"""Launches that are prepared once and started often: arguments are checked and packed, only a few numbers change."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from onekernel.device.driver import check
from onekernel.device.kernel import Arg, Kernel
from onekernel.device.spec import KernelSpec, Param, Pointer, Scalar
from onekernel.errors import DeviceError

FORMATS = {"i32": "i4x", "u32": "I4x", "i64": "q", "u64": "Q", "f32": "f4x"}
SLOT_BYTES = 8
"""An argument begins at a multiple of this; the driver copies as many bytes as the kernel's parameter has."""


def changing_places(spec: KernelSpec, changing: Sequence[str]) -> list[int]:
    """Return where the named numbers stand among a kernel's parameters; raises DeviceError for a name that is none."""
    numbers = {param.name: place for place, param in enumerate(spec.params) if isinstance(param, Scalar)}
    for name in changing:
        if name not in numbers:
            raise DeviceError(f"kernel {spec.entry} has no number {name!r}; it has {', '.join(numbers) or 'none'}")
    return [numbers[name] for name in changing]


def offsets(spec: KernelSpec) -> list[int]:
    """Return where each of a kernel's arguments begins among the packed ones, in bytes."""
    sizes = [struct.calcsize("<" + _format(param)) for param in spec.params]
    return [0, *accumulate(sizes[:-1])] if sizes else []


class ArgumentSlots:
    """Memory in which a kernel's arguments lie as the driver takes them."""

    def __init__(self, spec: KernelSpec) -> None:
        self._packer = struct.Struct("<" + "".join(_format(param) for param in spec.params))
        self.buffer = ctypes.create_string_buffer(self._packer.size + 1)
        first = ctypes.addressof(self.buffer)
        self._pointers = (ctypes.c_void_p * len(spec.params))(*(first + offset for offset in offsets(spec)))
        self.address = ctypes.addressof(self._pointers)

    def fill(self, values: Sequence[int | float | bytes]) -> None:
        """Put in every argument."""
        self._packer.pack_into(self.buffer, 0, *values)


class CudaBound:
    """A prepared launch on a GPU; see `kernel.Bound`. It holds its tensors.

    configure: stream -> the driver's configuration, which all launches of this kernel and shape share under `lock`.
    """

    def __init__(
        self,
        spec: KernelSpec,
        args: Sequence[Arg],
        values: Sequence[int | float | bytes],
        changing: Sequence[str],
        function: Any,
        cuda: Any,
        device: torch.device,
        lock: threading.Lock,
        configure: Callable[[int], Any],
    ) -> None:
        self._entry, self._function, self._cuda, self._device = spec.entry, function, cuda, device.index
        self._start, self._lock, self._configure = cuda.cuLaunchKernelEx, lock, configure
        self._args = tuple(args)
        self._slots = ArgumentSlots(spec)
        self._slots.fill(values)
        self._buffer, self._address = self._slots.buffer, self._slots.address
        starts = offsets(spec)
        self._writers = [
            (struct.Struct("<" + _format(spec.params[place])).pack_into, starts[place])
            for place in changing_places(spec, changing)
        ]
        self._configs: dict[int, Any] = {}

    def launch(self, grid: int, *numbers: float) -> None:
        """Start `grid` CTAs; see `kernel.Bound.launch`. Raises DeviceError if a number does not fit its parameter."""
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        config = self._configs.get(stream)
        if config is None:
            config = self._configs[stream] = self._configure(stream)
        with self._lock:
            config.gridDimX = grid
            try:
                for (write, place), number in zip(self._writers, numbers, strict=True):
                    write(self._buffer, place, number)
            except (struct.error, ValueError) as error:
                raise DeviceError(f"kernel {self._entry} is launched with the numbers {numbers}: {error}") from None
            result = self._start(config, self._function, self._address, 0)
        if result[0] != 0:
            check(result, f"launching kernel {self._entry}", self._cuda)


class CheckedBound:
    """A prepared launch of any kernel, whose arguments are checked each time: what the CPU shim has."""

    def __init__(
        self, kernel: Kernel, block: int, args: Sequence[Arg], shared_bytes: int, changing: Sequence[str]
    ) -> None:
        self._kernel, self._block, self._shared_bytes = kernel, block, shared_bytes
        self._args = list(args)
        self._places = changing_places(kernel.spec, changing)

    def launch(self, grid: int, *numbers: float) -> None:
        """Run the kernel; see `kernel.Bound.launch`."""
        if len(numbers) != len(self._places):
            raise DeviceError(
                f"kernel {self._kernel.spec.entry} is launched with {len(numbers)} numbers, not {len(self._places)}"
            )
        for place, number in zip(self._places, numbers, strict=True):
            self._args[place] = number
        self._kernel.launch(grid, self._block, self._args, shared_bytes=self._shared_bytes)


def _format(param: Param) -> str:
    if isinstance(param, Pointer):
        return "Q"
    return FORMATS[param.kind] if isinstance(param, Scalar) else f"{-(-param.size // SLOT_BYTES) * SLOT_BYTES}s"
