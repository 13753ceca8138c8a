"""The shape of the source: which part may import which, what only one part may do, and how long a file may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import onekernel

SOURCE = Path(onekernel.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

LEAVES = {"errors", "env", "config"}
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "env": {"errors"},
    "config": {"errors"},
    "text": set(),
    "weights": set(),
    "device": set(),
    "kernels": {"device"},
    "phases": {"text", "weights"},
    "models": {"text", "weights", "phases"},
    "plan": {"weights", "phases", "models"},
    "ops": {"weights", "device", "kernels"},
    "engine": {"text", "weights", "phases", "models", "plan", "device", "kernels", "ops"},
    "llm": {"text", "weights", "models", "plan", "device", "engine"},
    "measure": {"plan", "engine", "llm"},
    "train": {"text", "weights", "phases", "models", "ops"},
    "server": {"text", "engine", "llm"},
    "cli": {"text", "weights", "models", "plan", "device", "engine", "llm", "measure", "train", "server"},
}
"""What each part may import besides errors, env, config and itself (ARCHITECTURE.md says why)."""

OUTSIDE = {"__init__", "__main__"}
"""The package's own front door hands out names of every part."""


def part_of(module: str) -> str:
    """`onekernel.text.tokenizer` -> `text`; the package itself is its `__init__`."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def imported(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Every module that is imported anywhere in a file, by its full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            # `from onekernel import llm` imports onekernel.llm, `from onekernel.llm import LLM` no deeper module.
            yield from (f"{base}.{alias.name}" if base == "onekernel" else base for alias in node.names)


def faults_in(source: str, path: Path) -> list[str]:
    """What in one file breaks a rule; `path` is relative to the package."""
    module = ".".join(["onekernel", *path.with_suffix("").parts]).removesuffix(".__init__")
    part = part_of(module)
    tree = ast.parse(source)
    found = []
    for name in set(imported(tree, module, path.name == "__init__.py")):
        top = name.split(".")[0]
        target = part_of(name)
        if top == "onekernel" and part not in OUTSIDE and target not in {part, "__version__"}:
            allowed = LAYERS[part] if part in LEAVES else LAYERS[part] | LEAVES
            if target not in allowed:
                found.append(f"imports {name}, which {part}/ must not know")
        if top in ("transformers", "accelerate"):
            found.append(f"imports {top}, which only tests may")
        if top == "cuda" and part != "device":
            found.append("imports cuda, which only device/ may")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print" and part != "cli":
            found.append(f"prints in line {node.lineno}, which only cli/ may")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_keeps_to_its_place(path: Path) -> None:
    assert faults_in(path.read_text(), path.relative_to(SOURCE)) == []


def test_every_part_has_a_place_in_the_order() -> None:
    parts = {part_of(".".join(["onekernel", *path.relative_to(SOURCE).with_suffix("").parts])) for path in FILES}
    assert parts - OUTSIDE <= set(LAYERS)


def test_the_order_has_no_circle() -> None:
    done: set[str] = set()
    while ready := {part for part in set(LAYERS) - done if LAYERS[part] <= done}:
        done |= ready
    assert done == set(LAYERS)


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("text/a.py", "from onekernel.weights.gguf import read", "imports onekernel.weights.gguf"),
        ("text/a.py", "from onekernel import llm", "imports onekernel.llm"),
        ("text/a.py", "from ..engine import request", "imports onekernel.engine"),
        ("text/__init__.py", "from ..engine import request", "imports onekernel.engine"),
        ("config.py", "from onekernel.env import get", "imports onekernel.env"),
        ("device/a.py", "import onekernel.models", "imports onekernel.models"),
        ("server/a.py", "def f():\n    from onekernel.plan.build import plan", "imports onekernel.plan.build"),
        ("engine/a.py", "def f():\n    import transformers.models", "imports transformers"),
        ("models/a.py", "from cuda.bindings import driver", "imports cuda"),
        ("text/a.py", "def f():\n    print(1)", "prints in line 2"),
    ],
)
def test_a_breach_is_seen(file: str, source: str, complaint: str) -> None:
    [fault] = faults_in(source, Path(file))
    assert fault.startswith(complaint)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("text/a.py", "from onekernel.errors import TemplateError\nfrom . import tokenizer\nfrom .stop import Stop"),
        ("device/a.py", "from cuda.bindings import driver"),
        ("cli/a.py", "from onekernel import __version__, llm\nprint(__version__)"),
        ("__init__.py", "from onekernel.llm import LLM"),
    ],
)
def test_what_is_allowed_passes(file: str, source: str) -> None:
    assert faults_in(source, Path(file)) == []


def test_no_file_is_too_long() -> None:
    root = Path(__file__).resolve().parents[2]
    python = [*FILES, root / "dev.py", *(root / "tests").rglob("*.py")]
    kernels = [path for path in SOURCE.rglob("*") if path.suffix in (".cu", ".cuh", ".h", ".hpp")]
    lengths = {path: len(path.read_text().splitlines()) for path in [*python, *kernels]}
    assert {path: lines for path, lines in lengths.items() if lines > (600 if path in kernels else 500)} == {}


@pytest.mark.complaint("D1", file="env.py", old="import tempfile", new="import tempfile, torch.utils.cpp_extension")
def test_nothing_links_torch() -> None:
    """A compiled extension fits one torch, one CUDA and one Python; this package must fit them all."""
    assert [path for path in SOURCE.rglob("*") if path.suffix in (".so", ".pyd", ".dylib", ".a", ".cpp")] == []
    torch_headers = re.compile(r"cpp_extension|torch/extension\.h|#include <(torch|ATen|c10)/|libtorch")
    texts = {path: path.read_text() for path in SOURCE.rglob("*") if path.suffix in (".py", ".cu", ".cuh", ".h")}
    assert [path for path, text in texts.items() if torch_headers.search(text)] == []


def import_everything_without(blocked: str) -> None:
    """Import every module of the package in a process where `blocked` cannot be imported."""
    modules = [".".join(["onekernel", *path.relative_to(SOURCE).with_suffix("").parts]) for path in FILES]
    program = f"""
import importlib, sys
sys.path.insert(0, {str(SOURCE.parent)!r})
sys.modules[{blocked!r}] = None
for name in {[name for name in modules if not name.endswith("__main__")]!r}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.complaint("D5", file="config.py", old="import math", new="import math, transformers")
def test_transformers_is_not_needed() -> None:
    import_everything_without("transformers")


def test_cuda_bindings_are_not_needed_to_import() -> None:
    """macOS has none."""
    import_everything_without("cuda")


def test_a_start_imports_no_compiler_of_torch() -> None:
    """torch._dynamo and sympy took as long to import as all the rest of a start; one innocent import brings them."""
    program = f"""
import sys
sys.path.insert(0, {str(SOURCE.parent)!r})
import onekernel.llm, onekernel.engine.load
print(*sorted({{"torch._dynamo", "torch._inductor", "sympy"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
