"""Check a launch's arguments against a kernel's parameters, and turn them into addresses and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from onekernel.device.kernel import Arg
from onekernel.device.spec import KernelSpec, Param, Pointer, Scalar, Struct
from onekernel.errors import DeviceError

_RANGES = {"i32": (-(2**31), 2**31), "u32": (0, 2**32), "i64": (-(2**63), 2**63), "u64": (0, 2**64)}


def bind(spec: KernelSpec, device: torch.device, args: Sequence[Arg]) -> list[int | float | bytes]:
    """Return the address of every tensor, the value of every number and the bytes of every struct, in order.

    Raises DeviceError naming the parameter for a wrong count, type, dtype, shape, device, stride or alignment: on the
    device each of these is silent corruption. It runs at every launch, so only a refusal spends time on words.
    """
    if len(args) != len(spec.params):
        names = ", ".join(param.name for param in spec.params)
        raise DeviceError(f"kernel {spec.entry} takes {len(spec.params)} arguments ({names}), not {len(args)}")
    sizes: dict[str, int] = {}
    values: list[int | float | bytes] = []
    for param, arg in zip(spec.params, args, strict=True):
        problem = _problem(param, arg, device, sizes)
        if problem is not None:
            raise DeviceError(f"{param.name} of kernel {spec.entry} {problem}")
        values.append(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg)
    return values


def _problem(param: Param, arg: Arg, device: torch.device, sizes: dict[str, int]) -> str | None:
    if isinstance(param, Pointer):
        return _tensor_problem(param, arg, device, sizes)
    if isinstance(param, Scalar):
        return _number_problem(param, arg, sizes)
    return _struct_problem(param, arg)


def _struct_problem(param: Struct, arg: Arg) -> str | None:
    if not isinstance(arg, bytes):
        return f"is {type(arg).__name__}; it must be the bytes of a struct"
    return None if len(arg) == param.size else f"has {len(arg)} bytes; the kernel's struct has {param.size}"


def _tensor_problem(param: Pointer, arg: Arg, device: torch.device, sizes: dict[str, int]) -> str | None:
    if not isinstance(arg, torch.Tensor):
        return f"is {arg!r}; it must be a {param.dtype} tensor"
    if arg.dtype is not _dtype(param.dtype):
        return f"has dtype {arg.dtype}; it must be {param.dtype}"
    if param.pinned:
        if arg.device.type != "cpu" or (device.type == "cuda" and not arg.is_pinned()):
            return f"is on {arg.device}; it must be in pinned host memory"
    elif arg.device != device:
        return f"is on {arg.device}; the kernel runs on {device}"
    shape = arg.shape
    if len(shape) != len(param.shape):
        return f"has shape {tuple(shape)}; it must have {len(param.shape)} dimensions"
    for dim, expected in enumerate(param.shape):
        size = shape[dim]
        wanted = expected if isinstance(expected, int) else sizes.setdefault(expected, size)
        if size != wanted:
            return f"has shape {tuple(shape)}, but {_owner(expected)} {wanted}"
    if not arg.is_contiguous():
        return f"has strides {arg.stride()}; it must be contiguous: pass .contiguous()"
    if arg.data_ptr() % param.align_bytes:
        return f"starts at {arg.data_ptr():#x}, not at a multiple of {param.align_bytes} bytes"
    return None


def _number_problem(param: Scalar, arg: Arg, sizes: dict[str, int]) -> str | None:
    kind = type(arg)
    if param.kind == "f32":
        return None if kind is float or kind is int else f"is {arg!r}; it must be a float"
    low, high = _RANGES[param.kind]
    if not isinstance(arg, int) or kind is not int or not low <= arg < high:  # a bool is an int too
        return f"is {arg!r}; it must be an int from {low} to {high - 1}"
    wanted = sizes.setdefault(param.name, int(arg))
    return None if arg == wanted else f"has value {arg}, but {_owner(param.name)} {wanted}"


def _owner(expected: int | str) -> str:
    return f"{expected} is" if isinstance(expected, str) else "the kernel takes"


@cache
def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DeviceError(f"{name!r} is not a torch dtype")
    return dtype
