"""Find the CUDA compiler and headers: the wheels that come with torch, else the toolkit beside nvcc."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from onekernel import env
from onekernel.errors import CompileError

MAJORS = (13, 12)
"""CUDA majors that kernels compile with, newest first."""

_WHEEL_FOLDERS = {13: ("cu13/lib", "cu13/include"), 12: ("cuda_nvrtc/lib", "cuda_runtime/include")}


@dataclass(frozen=True, slots=True)
class Toolkit:
    """One NVRTC library with the headers of its major. `version` names both exactly: it is part of the cache key."""

    nvrtc: Path
    include: Path
    version: str

    @property
    def release(self) -> tuple[int, int]:
        """The CUDA release, such as (13, 0)."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)

    @property
    def major(self) -> int:
        """The CUDA major, 12 or 13."""
        return self.release[0]


@cache
def default_toolkit() -> Toolkit:
    """Return the toolkit of the CUDA major that torch was built for, so that both need the same driver.

    A torch without CUDA takes what is installed, newest first.
    """
    import torch

    if torch.version.cuda is None:
        return find_toolkit()
    return find_toolkit([int(torch.version.cuda.split(".")[0])])


def find_toolkit(majors: Sequence[int] = MAJORS, folders: Sequence[str] | None = None) -> Toolkit:
    """Return the first NVRTC of one of `majors` in `folders` (sys.path by default) or beside nvcc.

    Raises CompileError with the command that installs one.
    """
    for major in majors:
        for toolkit in _candidates(major, sys.path if folders is None else folders):
            return toolkit
    major = majors[0]
    suffix = "" if major >= 13 else f"-cu{major}"
    raise CompileError(
        f"no libnvrtc.so.{major} with its headers in Python's path or beside nvcc; install them with: pip install "
        f"'nvidia-cuda-nvrtc{suffix}=={major}.*' 'nvidia-cuda-runtime{suffix}=={major}.*'"
    )


def find_nvcc() -> Path | None:
    """Return the nvcc that ONEKERNEL_NVCC names, else the one on PATH, else None."""
    path = env.get("ONEKERNEL_NVCC") or shutil.which("nvcc")
    return Path(path) if path else None


def _candidates(major: int, folders: Sequence[str]) -> Iterator[Toolkit]:
    for folder in folders:
        lib, include = (Path(folder) / "nvidia" / part for part in _WHEEL_FOLDERS[major])
        library = lib / f"libnvrtc.so.{major}"
        if library.exists() and (include / "cuda_bf16.h").exists():
            version = _wheel_version(folder, "nvidia-cuda-nvrtc", major)
            yield Toolkit(
                library, include, f"{version} (headers {_wheel_version(folder, 'nvidia-cuda-runtime', major)})"
            )
    if (nvcc := find_nvcc()) is not None:
        root = nvcc.resolve().parent.parent
        library = root / "lib64" / f"libnvrtc.so.{major}"
        if library.exists() and (root / "include" / "cuda_bf16.h").exists():
            # A toolkit's library is a link to a file named after the exact version, and its headers belong to it.
            exact = re.search(r"\.so\.(\d+\.\d+\.\d+)$", library.resolve().name)
            yield Toolkit(library, root / "include", exact[1] if exact else f"{major}.0.0")


def _wheel_version(folder: str, project: str, major: int) -> str:
    # By name: reading the metadata of everything that is installed takes a fifth of a second at each start.
    versions = [
        dist.version
        for name in (project, f"{project}-cu{major}")
        for dist in distributions(name=name, path=[folder])
        if dist.version.startswith(f"{major}.")
    ]
    return versions[0] if versions else f"{major}.0.0"
