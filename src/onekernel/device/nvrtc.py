"""NVRTC through ctypes: source text to a cubin in this process, without a GPU, a driver or a toolkit.

Through ctypes rather than cuda-bindings because its nine functions are the same in CUDA 12 and 13, while one release of
the bindings loads the library of one major only; and it takes no import time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from onekernel.device.spec import KernelSpec, Source
from onekernel.device.toolkit import Toolkit, default_toolkit
from onekernel.errors import CompileError


class NvrtcCompiler:
    """The compiler that users run. The 135 MB library is loaded at the first compile, not before."""

    def __init__(self, toolkit: Toolkit | None = None) -> None:
        self._toolkit = toolkit or default_toolkit()
        self.version = f"nvrtc {self._toolkit.version}"

    def options(self, spec: KernelSpec) -> tuple[str, ...]:
        """Return the options of the exact real architecture: for a virtual one NVRTC makes PTX and no cubin."""
        # NVRTC's own cache (from 12.9 on, where there is a driver) would leave the assembler's report out of the log.
        own_cache = ("--no-cache",) if self._toolkit.release >= (12, 9) else ()
        return ("-std=c++20", f"--gpu-architecture={spec.arch}", "--ptxas-options=-v", *own_cache, *spec.options)

    def compile(self, source: Source, options: Sequence[str]) -> tuple[bytes | None, str]:
        """Return the cubin, or None if the source is at fault, and the whole log."""
        library = _load(self._toolkit.nvrtc)
        program = ctypes.c_void_p()
        names, texts = list(source.included), list(source.included.values())
        _call(
            library,
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.text.encode(),
            source.name.encode(),
            len(names),
            _strings(texts),
            _strings(names),
        )
        try:
            flags = [*options, f"-I{self._toolkit.include}"]
            status = library.nvrtcCompileProgram(program, len(flags), _strings(flags))
            log = _read(library, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            if status == 0:
                return _read(library, "CUBIN", program), log
            return None, log or f"nvrtc: error: {_error(library, status)}"
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def _load(path: Path) -> ctypes.CDLL:
    try:
        # NVRTC opens its built-in functions by bare name, which the loader finds only if they are loaded already.
        for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins))
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise CompileError(f"{path} does not load: {error}") from error
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _read(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _call(library, f"nvrtcGet{what}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _call(library, f"nvrtcGet{what}", program, buffer)
    return buffer.raw


def _call(library: ctypes.CDLL, name: str, *args: Any) -> None:
    if (status := getattr(library, name)(*args)) != 0:
        raise CompileError(f"{name} failed: {_error(library, status)}")


def _error(library: ctypes.CDLL, status: int) -> str:
    return bytes(library.nvrtcGetErrorString(status)).decode()


def _strings(texts: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))
