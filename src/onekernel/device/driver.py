"""The CUDA driver through cuda-bindings: loaded late, every status turned into one exception. No runtime library."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from onekernel import env
from onekernel.errors import DeviceError

_NO_DEVICE = 100
_CONTEXT_LOST = {
    214: "an uncorrectable memory (ECC) error",
    700: "an illegal memory access",
    702: "a kernel that ran longer than the display watchdog allows",
    710: "an assertion in a kernel",
    714: "a hardware stack error",
    715: "an illegal instruction",
    716: "a misaligned address",
    717: "an operation on the wrong address space",
    718: "an invalid program counter",
    719: "a kernel that failed",
}
"""CUresult values after which no call on the context succeeds any more, and what they mean."""


@cache
def driver() -> Any:
    """Return the module cuda.bindings.driver, initialised; raises DeviceError in one sentence if it cannot be."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise DeviceError("no NVIDIA driver found (libcuda.so.1); use --device cpu") from None
    try:
        from cuda.bindings import driver as cuda
    except ImportError as error:
        raise DeviceError(f"cuda-bindings does not import ({error}); pip install cuda-bindings") from error
    initialise(cuda)
    return cuda


def initialise(cuda: Any) -> None:
    """Call cuInit; raises DeviceError that says whether the process sees no GPU or the driver fails."""
    (status,) = cuda.cuInit(0)
    if int(status) == _NO_DEVICE:
        visible = env.get("CUDA_VISIBLE_DEVICES") or "empty or not set"
        raise DeviceError(f"the NVIDIA driver sees no GPU (CUDA_VISIBLE_DEVICES is {visible}); use --device cpu")
    check((status,), "initialising the NVIDIA driver", cuda)


def check(result: tuple[Any, ...], doing: str, cuda: Any = None) -> Any:
    """Return the values of a driver call without its status; raises DeviceError saying what failed while `doing`.

    `context_lost` of the error is True if the process can no longer use the GPU.
    """
    status, *values = result
    if int(status) != 0:
        raise _failure(int(status), doing, cuda or driver())
    return values[0] if len(values) == 1 else tuple(values)


def is_current(context: Any, cuda: Any) -> bool:
    """Tell whether `context` is current on this thread: a new thread has none, another device's may be set."""
    return int(check(cuda.cuCtxGetCurrent(), "reading the current context", cuda)) == int(context)


@contextmanager
def current(context: Any, cuda: Any) -> Iterator[None]:
    """Make `context` current on this thread inside the block."""
    check(cuda.cuCtxPushCurrent(context), "entering the device's context", cuda)
    try:
        yield
    finally:
        check(cuda.cuCtxPopCurrent(), "leaving the device's context", cuda)


def _failure(status: int, doing: str, cuda: Any) -> DeviceError:
    name = cuda.CUresult(status).name
    if status in _CONTEXT_LOST:
        return DeviceError(
            f"{doing} failed with {name}: {_CONTEXT_LOST[status]}, now or in an earlier kernel; this process can no "
            f"longer use the GPU, restart it",
            context_lost=True,
        )
    _, text = cuda.cuGetErrorString(cuda.CUresult(status))
    return DeviceError(f"{doing} failed with {name}: {text.decode() if text else 'no text'}")
