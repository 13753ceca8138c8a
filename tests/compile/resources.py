"""What every kernel costs on every architecture with both compilers, against the committed table.

python3 -m tests.compile.resources      compile all of it and write resources.json anew
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

from onekernel.device.compile import Compiled, compile_kernel
from onekernel.device.nvrtc import NvrtcCompiler
from onekernel.device.toolkit import find_toolkit
from onekernel.kernels.registry import KERNELS

TABLE = Path(__file__).with_name("resources.json")
REFRESH = "python3 -m tests.compile.resources"

Rows = dict[str, dict[str, int]]
"""'kernel architecture compiler' -> registers, SASS bytes and static shared bytes."""


@cache
def compiler(major: int) -> NvrtcCompiler:
    """Return the NVRTC of CUDA 13, which the package requires, or of CUDA 12, which dev.py unpacks beside it."""
    if major == 13:
        return NvrtcCompiler(find_toolkit([13]))
    folder = Path(sys.prefix) / "cuda12"
    assert folder.is_dir(), f"{folder} is missing: run `python3 dev.py install`"
    return NvrtcCompiler(find_toolkit([12], [str(folder)]))


def cases() -> list[tuple[str, str, int]]:
    """Return every (kernel, architecture, CUDA major) that must compile."""
    return [
        (name, arch, major) for name, kernel in KERNELS.items() for arch in kernel.architectures for major in (13, 12)
    ]


def build(name: str, arch: str, major: int) -> Compiled:
    """Compile one case."""
    return compile_kernel(KERNELS[name].for_arch(arch), compiler(major))


def key(name: str, arch: str, major: int) -> str:
    """Return a case's name in the table, without the headers' version, which changes no code."""
    return f"{name} {arch} {compiler(major).version.partition(' (')[0]}"


def row(compiled: Compiled) -> dict[str, int]:
    """Return the figures that are kept."""
    found = compiled.resources
    return {"registers": found.registers, "sass_bytes": found.sass_bytes, "shared_bytes": found.shared_bytes}


def read_table() -> Rows:
    """Return the committed table."""
    rows: Rows = json.loads(TABLE.read_text())
    return rows


def main() -> None:
    """Write the table, one line a row, so that a review sees what grew."""
    rows: Rows = {}
    for case in cases():
        compiled = build(*case)
        rows[key(*case)] = row(compiled)
        print(f"{key(*case):40} {compiled.resources} {compiled.seconds:.2f} s", flush=True)
    lines = [f" {json.dumps(name)}: {json.dumps(rows[name])}" for name in sorted(rows)]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
