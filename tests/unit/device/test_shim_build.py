"""What decides a build for the CPU, and what is said when there is no compiler. Nothing is compiled here."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from onekernel.device import shim_build
from onekernel.device.shim_build import Build, HostCompiler, build_kernel, find_host_compiler
from onekernel.device.spec import KERNELS, KernelSpec
from onekernel.errors import DeviceError

GCC = HostCompiler(Path("/usr/bin/g++"), "g++ 12.2.0")
SPEC = KernelSpec("selfcheck.cu", "selfcheck", constants={"THREADS": 256})


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match=r"no host C\+\+ compiler .* on PATH; install one"):
        find_host_compiler()


def test_a_compiler_that_does_not_run_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, code in (("g++", 1), ("clang++", 0)):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho {name} version 1\nexit {code}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert find_host_compiler() == HostCompiler(tmp_path / "clang++", "clang++ version 1")


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """key(spec, build, compiler): the name of the file that would be built."""
    names: list[str] = []

    def compiler(command: list[str], **_: object) -> object:
        output = Path(command[command.index("-o") + 1])
        output.touch()
        names.append(output.name.rpartition(".")[0])
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(shim_build.env, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr("subprocess.run", compiler)

    def name(spec: KernelSpec = SPEC, build: Build = Build.PLAIN, by: HostCompiler = GCC) -> str:
        path = build_kernel(spec, build, by)
        path.unlink()
        return names.pop()

    return name


@pytest.mark.parametrize(
    "changed",
    [
        {"spec": replace(SPEC, constants={"THREADS": 128})},
        {"build": Build.ADDRESS},
        {"build": Build.UCONTEXT},
        {"by": replace(GCC, version="g++ 13.1.0")},
        {"by": replace(GCC, path=Path("/opt/g++"))},
    ],
    ids=lambda changed: str(next(iter(changed))),
)
def test_what_changes_the_program_changes_its_name(key, changed) -> None:
    assert key() == key()
    assert key(**changed) != key()


@pytest.mark.parametrize("file", ["selfcheck.cu", "ptx/platform.cuh", "shim/memory.h"])
def test_an_edited_source_is_built_anew(key, tmp_path: Path, file: str) -> None:
    root = tmp_path / "kernels"
    shutil.copytree(KERNELS, root, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    before = key(replace(SPEC, root=root))
    with (root / file).open("a") as source:
        source.write("// edited\n")
    assert key(replace(SPEC, root=root)) != before
