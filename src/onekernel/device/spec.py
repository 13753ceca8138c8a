"""A kernel as plain data, and the text that is compiled for it. Nothing here needs a GPU, a compiler or torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from onekernel.errors import CompileError, ConfigError

KERNELS = Path(str(files("onekernel") / "kernels"))
"""The folder of the package's kernel sources; every #include "..." is written relative to it, or to the package itself
for the kernels that lie beside their reference in phases/."""

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Pointer:
    """A kernel parameter that takes a contiguous tensor.

    `shape` holds numbers, or names that must agree between all parameters of one launch; an integer `Scalar` of the
    same name takes part, so a tensor that does not fit the count beside it is refused. `dtype` is torch's name.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    pinned: bool = False
    """True: page-locked host memory, which kernel and host both see."""
    align_bytes: int = 16
    """What the address must be a multiple of: 16 for bulk copies and vector loads."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A kernel parameter that takes a number: int, unsigned, long long, unsigned long long or float in CUDA."""

    name: str
    kind: Literal["i32", "u32", "i64", "u64", "f32"] = "i32"


@dataclass(frozen=True, slots=True)
class Struct:
    """A kernel parameter that takes a struct of `size` bytes by value, as `bytes`.

    It lies in constant memory: reading a member costs an operand, not a trip to global memory.
    """

    name: str
    size: int


Param = Pointer | Scalar | Struct


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """What to compile: an `extern "C"` entry of a source file, its constants, the exact architecture and options.

    `constants` become `#define NAME value` in front of the file. `params` state what the entry takes; they check
    launches and do not change the compiled code.
    """

    file: str
    entry: str
    constants: Mapping[str, int | str] = field(default_factory=dict)
    arch: str = "sm_90a"
    options: tuple[str, ...] = ()
    params: tuple[Param, ...] = ()
    root: Path = KERNELS

    def __post_init__(self) -> None:
        object.__setattr__(self, "constants", MappingProxyType(dict(sorted(self.constants.items()))))
        if not re.fullmatch(r"sm_\d{2,3}[af]?", self.arch):
            raise ConfigError(f"architecture {self.arch!r} of kernel {self.entry} is not of the form sm_90a or sm_100")
        for name in (self.entry, *self.constants, *(param.name for param in self.params)):
            if not name.isidentifier():
                raise ConfigError(f"{name!r} in the spec of {self.file} is not a C identifier")


@dataclass(frozen=True, slots=True)
class Source:
    """A translation unit without the toolkit's headers: the generated text, and every file it includes by name."""

    name: str
    text: str
    included: Mapping[str, str]


def render(spec: KernelSpec) -> str:
    """Return the generated text: the constants in alphabetical order, then one include. No logic."""
    defines = [f"#define {name} {_literal(value)}" for name, value in spec.constants.items()]
    return "\n".join([*defines, f'#include "{spec.file}"', ""])


def included(spec: KernelSpec) -> dict[str, str]:
    """Return name -> text of every file the spec's source includes with quotes, in the order first met.

    Raises CompileError for a file that does not exist under `spec.root`: names are always relative to that folder, so
    that NVRTC, nvcc and the host compilers find the same file.
    """
    found: dict[str, str] = {}
    _follow(spec.file, "the kernel spec", spec.root, found)
    return found


def included_text(spec: KernelSpec) -> str:
    """Return all included files as one text for the cache key, each under its name."""
    return "".join(f"// {name}\n{text}\n" for name, text in included(spec).items())


def source(spec: KernelSpec) -> Source:
    """Return what a compiler needs. Its name differs from every included name, which NVRTC demands."""
    return Source(f"{spec.entry}.generated.cu", render(spec), included(spec))


def write_source(source: Source, folder: Path) -> Path:
    """Write all files into `folder`, so that any compiler given `-I folder` can take the returned one."""
    for name, text in {**source.included, source.name: source.text}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / source.name


def _literal(value: int | str) -> str:
    if isinstance(value, str):
        return value
    number = int(value)
    return str(number) if number >= 0 else f"({number})"


def _follow(name: str, includer: str, root: Path, found: dict[str, str]) -> None:
    if name in found:
        return
    path = next((path for path in (root / name, root.parent / name) if path.is_file()), None)
    if path is None or ".." in Path(name).parts:
        raise CompileError(
            f'"{name}", included by {includer}, is not a file in {root}; write names relative to that folder'
        )
    found[name] = text = path.read_text(encoding="utf-8")
    for inner in _INCLUDE.findall(text):
        _follow(inner, name, root, found)
