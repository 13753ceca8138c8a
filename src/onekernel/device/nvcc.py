"""nvcc behind the same interface, for debugging: -lineinfo, -G, a profiler's source view, a second opinion."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from onekernel.device.spec import KernelSpec, Source, write_source
from onekernel.device.toolkit import find_nvcc
from onekernel.errors import CompileError


class NvccCompiler:
    """An nvcc of any CUDA 12 or 13 toolkit."""

    def __init__(self, path: Path | None = None) -> None:
        found = path or find_nvcc()
        if found is None:
            raise CompileError("no nvcc on PATH; set ONEKERNEL_NVCC to its path, or unset it to compile with NVRTC")
        self._path = found
        self.version = f"nvcc {_version(found)}"

    def options(self, spec: KernelSpec) -> tuple[str, ...]:
        """Return the options. `-arch=sm_90a` would add a compute_90 pass, which refuses wgmma and setmaxnreg."""
        number = spec.arch.removeprefix("sm_")
        gencode = f"-gencode=arch=compute_{number},code=sm_{number}"
        return ("-std=c++20", gencode, "-cubin", "--ptxas-options=-v", *spec.options)

    def compile(self, source: Source, options: Sequence[str]) -> tuple[bytes | None, str]:
        """Return the cubin, or None if the source is at fault, and the whole log."""
        with tempfile.TemporaryDirectory(prefix="onekernel-nvcc-") as name:
            folder = Path(name)
            main = write_source(source, folder)
            cubin = folder / "out.cubin"
            command = [str(self._path), *options, f"-I{folder}", "-o", str(cubin), str(main)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            log = (done.stdout + done.stderr).replace(f"{folder}/", "")
            return (cubin.read_bytes() if done.returncode == 0 else None), log


@cache
def _version(path: Path) -> str:
    try:
        done = subprocess.run([str(path), "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(f"{path} --version failed: {error}; set ONEKERNEL_NVCC to a working nvcc") from error
    _, found, rest = done.stdout.partition(", V")
    return rest.split()[0] if found else done.stdout.strip()
