"""Compile a kernel spec to a cubin for its exact architecture, and count the compiler's runs."""

from __future__ import annotations

import hashlib
import logging
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from onekernel import env
from onekernel.device.cubin import Resources, read_resources
from onekernel.device.nvcc import NvccCompiler
from onekernel.device.nvrtc import NvrtcCompiler
from onekernel.device.spec import KernelSpec, Source, included_text, render, source, write_source
from onekernel.errors import CompileError

log = logging.getLogger(__name__)


class Compiler(Protocol):
    """NVRTC or nvcc. `version` is exact: with the options and the text it decides the cubin."""

    version: str

    def options(self, spec: KernelSpec) -> tuple[str, ...]:
        """Return the options for a spec, without paths of this machine."""
        ...

    def compile(self, source: Source, options: Sequence[str]) -> tuple[bytes | None, str]:
        """Return the cubin, or None if the source is at fault, and the whole log."""
        ...


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel's machine code with what the compiler said about it."""

    cubin: bytes
    log: str
    resources: Resources
    compiler: str
    seconds: float


class _Runs:
    """The process's compiler runs: how many, and whether the warm-up is over."""

    def __init__(self) -> None:
        self.count = 0
        self.ready = False
        self.refuse_late = False


_runs = _Runs()


def compiler_runs() -> int:
    """Return how often this process has run a compiler; 0 on a start that found everything in the cache."""
    return _runs.count


def mark_ready(ready: bool = True) -> None:
    """Say that the warm-up is over: from now on a compile delays somebody's request and is logged as a warning."""
    _runs.ready = ready


@contextmanager
def refuse_late_compiles() -> Iterator[None]:
    """Make a compile after `mark_ready` raise CompileError inside the block: for tests of the warm-up."""
    before, _runs.refuse_late = _runs.refuse_late, True
    try:
        yield
    finally:
        _runs.refuse_late = before


def choose_compiler(backend: Literal["nvrtc", "nvcc"] | None = None) -> Compiler:
    """Return the compiler asked for; by default nvcc if ONEKERNEL_NVCC is set, else NVRTC."""
    if backend == "nvcc" or (backend is None and env.get("ONEKERNEL_NVCC")):
        return NvccCompiler()
    return NvrtcCompiler()


def cache_key(spec: KernelSpec, compiler: Compiler) -> str:
    """Return the hash of the entry and all that decides the cubin: both texts, options, architecture, compiler."""
    parts = (spec.entry, render(spec), included_text(spec), *compiler.options(spec), compiler.version, spec.arch)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def compile_kernel(spec: KernelSpec, backend: Literal["nvrtc", "nvcc"] | Compiler | None = None) -> Compiled:
    """Compile in this process, past every cache; see `cache.KernelCache` for the cached way.

    Raises CompileError with the first error line, the options and where the source was kept.
    """
    compiler = choose_compiler(backend) if backend is None or isinstance(backend, str) else backend
    options = compiler.options(spec)
    text = source(spec)
    _note_run(spec)
    start = time.perf_counter()
    cubin, output = compiler.compile(text, options)
    seconds = time.perf_counter() - start
    if cubin is None:
        raise _failure(spec, compiler, text, options, output)
    log.debug("compiled %s for %s with %s in %.2f s", spec.entry, spec.arch, compiler.version, seconds)
    return Compiled(cubin, output, read_resources(output, cubin), compiler.version, seconds)


def first_error(output: str) -> str:
    """Return the first line of a compiler's log that states an error, or its first line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = (line for line in lines if re.search(r"\b(error|fatal)\b", line, re.IGNORECASE))
    return next(errors, lines[0] if lines else "the compiler gave no reason")


def _note_run(spec: KernelSpec) -> None:
    if _runs.ready:
        late = f"kernel {spec.entry} is compiled after the warm-up; add its spec to the warm-up"
        if _runs.refuse_late:
            raise CompileError(late)
        log.warning(late)
    _runs.count += 1


def _failure(spec: KernelSpec, compiler: Compiler, text: Source, options: Sequence[str], output: str) -> CompileError:
    reason = first_error(output)
    folder = _keep(text, f"{spec.entry}-{cache_key(spec, compiler)[:16]}", output)
    return CompileError(
        f"kernel {spec.entry} does not compile for {spec.arch} with {compiler.version}: {reason}\n"
        f"  options: {' '.join(options)}\n"
        f"  source and full log: {folder}",
        first_error=reason,
        options=tuple(options),
        source_path=folder,
    )


def _keep(text: Source, name: str, output: str) -> Path:
    try:
        return _write(env.cache_dir() / "failed" / name, text, output)
    except OSError:  # a full or read-only cache must not hide the compiler's message
        return _write(Path(tempfile.mkdtemp(prefix=f"onekernel-{name}-")), text, output)


def _write(folder: Path, text: Source, output: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_source(text, folder)
    (folder / "log.txt").write_text(output, encoding="utf-8")
    return folder
