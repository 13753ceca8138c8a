"""Build a kernel spec for the CPU with g++ or clang++: a library, or a program under a sanitizer."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import uuid
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from onekernel import env
from onekernel.device.compile import first_error
from onekernel.device.spec import KERNELS, KernelSpec, included_text, render
from onekernel.errors import CompileError, DeviceError


class Build(Enum):
    """How a kernel is built for the CPU."""

    PLAIN = "plain"
    ADDRESS = "address"
    """AddressSanitizer and UBSan."""
    THREAD = "thread"
    """ThreadSanitizer, one OS thread per device thread: for a few small CTAs."""
    UCONTEXT = "ucontext"
    """PLAIN with the portable fiber switch, which machines other than x86-64 Linux always use."""


_OPTIONS = {
    Build.PLAIN: ("-O1", "-fPIC", "-shared"),
    Build.UCONTEXT: ("-O1", "-fPIC", "-shared", "-DSHIM_UCONTEXT"),
    Build.ADDRESS: ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
    Build.THREAD: ("-O1", "-fsanitize=thread", "-DSHIM_OS_THREADS"),
}
# Kernels reinterpret words as vectors, which the CUDA compilers allow; sums must not depend on the host's FMA.
_COMMON = (
    "-x",
    "c++",
    "-std=c++17",
    "-g1",
    "-pthread",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
)


@dataclass(frozen=True, slots=True)
class HostCompiler:
    """A C++ compiler and the first line of what it says about itself, which is part of every build's key."""

    path: Path
    version: str


def find_host_compiler() -> HostCompiler:
    """Return g++ or clang++ from PATH; raises DeviceError with the way to get one."""
    for name in ("g++", "clang++"):
        if (found := shutil.which(name)) is not None:
            output = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
            if output.returncode == 0:
                return HostCompiler(Path(found), output.stdout.partition("\n")[0])
    raise DeviceError("no host C++ compiler (g++ or clang++) on PATH; install one, for example with apt install g++")


def is_program(build: Build) -> bool:
    """Say whether a build is a program of its own: a sanitizer wants to be in a process from its start."""
    return build in (Build.ADDRESS, Build.THREAD)


def build_kernel(spec: KernelSpec, build: Build, compiler: HostCompiler | None = None) -> Path:
    """Return the built file from the cache folder, building it if its sources, options or compiler are new.

    Raises CompileError with the first error line, the options and where the source was kept, and DeviceError if there
    is no compiler.
    """
    compiler = compiler or find_host_compiler()
    options = (*_COMMON, *_OPTIONS[build])
    text = _text(spec, build)
    folder = env.cache_dir() / "shim"
    name = f"{spec.entry}-{build.value}-{_key(spec, text, options, compiler)[:16]}"
    built = folder / (name if is_program(build) else f"{name}{'.dylib' if sys.platform == 'darwin' else '.so'}")
    if built.exists():
        return built
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"{name}.cu"
    source.write_text(text, encoding="utf-8")
    aside = folder / f"{name}.{uuid.uuid4().hex}"
    includes = (f"-I{spec.root}", f"-I{spec.root.parent}", f"-I{KERNELS}", f"-I{KERNELS.parent}")
    command = [str(compiler.path), *options, *includes, str(source), "-o", str(aside)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = first_error(done.stderr)
        raise CompileError(
            f"kernel {spec.entry} does not compile for the CPU with {compiler.version}: {reason}\n"
            f"  options: {' '.join(options)}\n"
            f"  source: {source}",
            first_error=reason,
            options=options,
            source_path=source,
        )
    aside.replace(built)  # another process may have built the same meanwhile: either file will do
    return built


def sanitizer_environment() -> dict[str, str]:
    """Return the environment for a sanitizer's program: stop at the first finding, with an exit code of its own."""
    return {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:exitcode=86",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1:exitcode=86",
        "TSAN_OPTIONS": "halt_on_error=1:exitcode=86",
    }


def _text(spec: KernelSpec, build: Build) -> str:
    program = '#include "shim/program.h"\n' if is_program(build) else ""
    return f'#include "shim/shim.h"\n{render(spec)}SHIM_ENTRY({spec.entry})\n{program}'


def _key(spec: KernelSpec, text: str, options: tuple[str, ...], compiler: HostCompiler) -> str:
    own = spec.root / "shim"
    headers = sorted((own if own.is_dir() else KERNELS / "shim").glob("*.h"))
    parts = [text, included_text(spec), *(path.read_text(encoding="utf-8") for path in headers)]
    parts += [*options, str(compiler.path), compiler.version, platform.machine()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
