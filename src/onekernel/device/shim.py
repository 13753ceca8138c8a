"""Run a kernel's own source on the CPU: what the GPU would do, on CPU tensors, in an order that a seed chooses."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from onekernel.device.arguments import bind
from onekernel.device.bound import CheckedBound
from onekernel.device.kernel import Arg
from onekernel.device.shim_build import Build, build_kernel, is_program, sanitizer_environment
from onekernel.device.spec import KernelSpec, Param, Pointer, Scalar
from onekernel.errors import DeviceError

_TYPES: dict[str, Any] = {
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
}
_CPU = torch.device("cpu")
_MESSAGE_BYTES = 1024


class _Config(ctypes.Structure):
    """`shim::Config` in kernels/shim/state.h."""

    _fields_ = (
        ("grid", ctypes.c_uint32),
        ("block", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint64),
        ("timeout_s", ctypes.c_double),
    )


class ShimKernel:
    """One entry built for the CPU. See `kernel.Kernel`; a launch here returns when the kernel has ended.

    `seed` chooses the order of threads, landings and relaxed stores. A launch that does not end within `timeout_s`
    raises DeviceError with what every thread waited for; one that breaks a rule which the GPU would not report (two
    counts at one barrier, a CTA that ends while copies are on their way, ...) with the rule; a sanitizer's finding
    with its report.
    """

    def __init__(self, spec: KernelSpec, *, build: Build = Build.PLAIN, seed: int = 0, timeout_s: float = 60.0) -> None:
        self.spec = spec
        self.build = build
        self.seed = seed
        self.timeout_s = timeout_s
        self._file = build_kernel(spec, build)
        self._library = None if is_program(build) else self._load()

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
        """Run the kernel to its end; see `kernel.Kernel.launch`. All CTAs are resident, and there is no stream."""
        if grid < 1 or block < 32 or block % 32 or block > 1024 or shared_bytes < 0:
            raise DeviceError(
                f"kernel {self.spec.entry}: grid is {grid}, block {block}, shared_bytes {shared_bytes}; they must be "
                f"at least 1, a multiple of 32 up to 1024, and at least 0"
            )
        if cluster < 1 or grid % cluster:
            raise DeviceError(f"kernel {self.spec.entry}: cluster {cluster} does not divide the grid of {grid}")
        values = bind(self.spec, _CPU, args)
        config = _Config(grid, block, cluster, self.seed % 2**32, shared_bytes, self.timeout_s)
        message = self._call(config, values) if self._library else self._run(config, values, args)
        if message:
            raise DeviceError(f"kernel {self.spec.entry} on the CPU (seed {self.seed}): {message}")

    def bind(
        self, block: int, args: Sequence[Arg], *, shared_bytes: int = 0, changing: Sequence[str] = ()
    ) -> CheckedBound:
        """Prepare launches; see `kernel.BindableKernel.bind`."""
        bind(self.spec, _CPU, args)
        return CheckedBound(self, block, args, shared_bytes, changing)

    def _load(self) -> ctypes.CDLL:
        library = ctypes.CDLL(str(self._file))
        library.shim_argument_bytes.restype = ctypes.POINTER(ctypes.c_uint32)
        sizes = list(takewhile(bool, library.shim_argument_bytes()))
        expected = [ctypes.sizeof(_type(param)) for param in self.spec.params]
        if sizes != expected:
            raise DeviceError(
                f"kernel {self.spec.entry} was compiled with parameters of {sizes} bytes, its spec states {expected}; "
                f"correct the params of the spec"
            )
        return library

    def _call(self, config: _Config, values: Sequence[int | float | bytes]) -> str:
        slots = [_slot(param, value) for param, value in zip(self.spec.params, values, strict=True)]
        addresses = (ctypes.c_void_p * max(len(slots), 1))(*(ctypes.addressof(slot) for slot in slots))
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        failed = self._library.shim_launch(  # type: ignore[union-attr]  # only called with a library
            ctypes.byref(config), addresses, message, ctypes.c_size_t(_MESSAGE_BYTES)
        )
        return message.value.decode(errors="replace") or "failed without a message" if failed else ""

    def _run(self, config: _Config, values: Sequence[int | float | bytes], args: Sequence[Arg]) -> str:
        with tempfile.TemporaryDirectory(prefix="onekernel-shim-") as folder:
            path = Path(folder) / "launch"
            buffers = _write_launch(path, config, self.spec, values, args)
            done = _execute([str(self._file), str(path)], 20 * self.timeout_s)
            if done.returncode != 0:
                return f"exit code {done.returncode}\n{_report(done.stderr)}"
            return _read_back(path, buffers)


def _type(param: Param) -> Any:
    if isinstance(param, Pointer):
        return ctypes.c_void_p
    return _TYPES[param.kind] if isinstance(param, Scalar) else ctypes.c_ubyte * param.size


def _slot(param: Param, value: int | float | bytes) -> Any:
    kind = _type(param)
    return kind.from_buffer_copy(value) if isinstance(value, bytes) else kind(value)


def _execute(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a sanitizer's program. An older ThreadSanitizer cannot start where addresses are randomised too widely."""
    for prefix in ([], [shutil.which("setarch") or "setarch", "-R"]):
        done = subprocess.run(
            [*prefix, *command],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout_s,
            env=sanitizer_environment(),
        )
        if "unexpected memory mapping" not in done.stderr:
            break
    return done


def _report(output: str) -> str:
    """Cut a sanitizer's output to its finding and the frames that lead there, without the shim's own."""
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if re.search(r"ERROR|WARNING|runtime error", line)), 0)
    return "\n".join([line for line in lines[start:] if not re.search(r"std::|shim::(run_kernel|start)", line)][:40])


def _write_launch(
    path: Path, config: _Config, spec: KernelSpec, values: Sequence[int | float | bytes], args: Sequence[Arg]
) -> list[torch.Tensor]:
    """Write what kernels/shim/program.h reads; returns the tensors whose bytes it writes back."""
    buffers: dict[int, tuple[int, torch.Tensor]] = {}
    with path.open("wb") as file:
        file.write(bytes(config) + struct.pack("<Q", len(values)))
        for index, (param, value, arg) in enumerate(zip(spec.params, values, args, strict=True)):
            if isinstance(arg, bytes):
                file.write(struct.pack("<QQ", 3, len(arg)) + arg)
            elif not isinstance(arg, torch.Tensor):
                slot = bytes(_type(param)(value)).ljust(8, b"\0")
                file.write(struct.pack("<Q", 0) + slot)
            elif arg.data_ptr() in buffers:
                file.write(struct.pack("<QQ", 2, buffers[arg.data_ptr()][0]))
            else:
                buffers[arg.data_ptr()] = index, arg
                content = arg.reshape(-1).view(torch.uint8).numpy()
                file.write(struct.pack("<QQ", 1, content.nbytes) + content.tobytes())
    return [tensor for _, tensor in buffers.values()]


def _read_back(path: Path, buffers: Sequence[torch.Tensor]) -> str:
    with path.open("rb") as file:
        (failed,) = struct.unpack("<Q", file.read(8))
        message = file.read(_MESSAGE_BYTES).partition(b"\0")[0].decode(errors="replace")
        for tensor in buffers:
            flat = tensor.reshape(-1).view(torch.uint8)
            flat.copy_(torch.frombuffer(bytearray(file.read(flat.numel())), dtype=torch.uint8))
    return message or "failed without a message" if failed else ""
