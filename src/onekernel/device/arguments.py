"""Check a launch's arguments against a kernel's parameters, and turn them into addresses and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from onekernel.device.kernel import Arg
from onekernel.device.spec import KernelSpec, Pointer, Scalar
from onekernel.errors import DeviceError

_RANGES = {"i32": (-(2**31), 2**31), "u32": (0, 2**32), "i64": (-(2**63), 2**63), "u64": (0, 2**64)}


def bind(spec: KernelSpec, device: torch.device, args: Sequence[Arg]) -> list[int | float]:
    """Return the address of every tensor and the value of every number, in order.

    Raises DeviceError naming the parameter for a wrong count, type, dtype, shape, device, stride or alignment: on the
    device each of these is silent corruption.
    """
    if len(args) != len(spec.params):
        names = ", ".join(param.name for param in spec.params)
        raise DeviceError(f"kernel {spec.entry} takes {len(spec.params)} arguments ({names}), not {len(args)}")
    sizes: dict[str, int] = {}
    values: list[int | float] = []
    for param, arg in zip(spec.params, args, strict=True):
        if isinstance(param, Pointer):
            values.append(_address(spec, param, arg, device, sizes))
        else:
            values.append(_number(spec, param, arg, sizes))
    return values


def _address(spec: KernelSpec, param: Pointer, arg: Arg, device: torch.device, sizes: dict[str, int]) -> int:
    where = f"{param.name} of kernel {spec.entry}"
    if not isinstance(arg, torch.Tensor):
        raise DeviceError(f"{where} is {arg!r}; it must be a {param.dtype} tensor")
    if arg.dtype != _dtype(param.dtype):
        raise DeviceError(f"{where} has dtype {arg.dtype}; it must be {param.dtype}")
    if param.pinned:
        if arg.device.type != "cpu" or (device.type == "cuda" and not arg.is_pinned()):
            raise DeviceError(f"{where} is on {arg.device}; it must be in pinned host memory")
    elif arg.device != device:
        raise DeviceError(f"{where} is on {arg.device}; the kernel runs on {device}")
    if arg.dim() != len(param.shape):
        raise DeviceError(f"{where} has shape {tuple(arg.shape)}; it must have {len(param.shape)} dimensions")
    for size, expected in zip(arg.shape, param.shape, strict=True):
        _agree(where, f"shape {tuple(arg.shape)}", size, expected, sizes)
    if not arg.is_contiguous():
        raise DeviceError(f"{where} has strides {arg.stride()}; it must be contiguous: pass .contiguous()")
    address = arg.data_ptr()
    if address % param.align_bytes:
        raise DeviceError(f"{where} starts at {address:#x}, not at a multiple of {param.align_bytes} bytes")
    return address


def _number(spec: KernelSpec, param: Scalar, arg: Arg, sizes: dict[str, int]) -> int | float:
    where = f"{param.name} of kernel {spec.entry}"
    if param.kind == "f32":
        if isinstance(arg, float) or type(arg) is int:
            return float(arg)
        raise DeviceError(f"{where} is {arg!r}; it must be a float")
    low, high = _RANGES[param.kind]
    if type(arg) is not int or not low <= arg < high:
        raise DeviceError(f"{where} is {arg!r}; it must be an int from {low} to {high - 1}")
    _agree(where, f"value {arg}", arg, param.name, sizes)
    return arg


def _agree(where: str, what: str, size: int, expected: int | str, sizes: dict[str, int]) -> None:
    wanted = expected if isinstance(expected, int) else sizes.setdefault(expected, size)
    if size != wanted:
        name = f"{expected} is" if isinstance(expected, str) else "the kernel takes"
        raise DeviceError(f"{where} has {what}, but {name} {wanted}")


@cache
def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DeviceError(f"{name!r} is not a torch dtype")
    return dtype
