"""The generated text is small and always the same, and the includes are followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from onekernel.device.spec import KernelSpec, included, included_text, render, source, write_source
from onekernel.errors import CompileError, ConfigError


def tree(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_cuh", ".cuh").replace("_cu", ".cu")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def test_the_text_does_not_depend_on_the_order_of_constants() -> None:
    one = KernelSpec("a.cu", "a", {"ROWS": 64, "BIAS": -1, "T": "float"})
    other = KernelSpec("a.cu", "a", {"T": "float", "BIAS": -1, "ROWS": 64})
    assert render(one) == '#define BIAS (-1)\n#define ROWS 64\n#define T float\n#include "a.cu"\n'
    assert render(one) == render(other)
    assert one == other


def test_includes_are_followed_once_each_in_the_order_met(tmp_path: Path) -> None:
    tree(
        tmp_path,
        a_cu='#include "tile__sum.cuh"\n#include <cuda_bf16.h>\n  #  include "ptx/mma.cuh"\n'.replace("__", "/"),
        tile__sum_cuh='#include "ptx/mma.cuh"\nint sum;',
        ptx__mma_cuh='#include "tile/sum.cuh"\nint mma;',
    )
    spec = KernelSpec("a.cu", "a", root=tmp_path)
    assert list(included(spec)) == ["a.cu", "tile/sum.cuh", "ptx/mma.cuh"]
    before = included_text(spec)
    (tmp_path / "ptx/mma.cuh").write_text("int mma2;")
    assert included_text(spec) != before


def test_a_kernel_beside_its_reference_is_found(tmp_path: Path) -> None:
    """phases/ lies beside kernels/."""
    (tmp_path / "kernels").mkdir()
    tree(tmp_path, kernels__a_cu='#include "phases/head.cuh"\n', phases__head_cuh="int head;")
    found = included(KernelSpec("a.cu", "a", root=tmp_path / "kernels"))
    assert found["phases/head.cuh"] == "int head;"


@pytest.mark.parametrize("name", ["ptx/none.cuh", "../outside.cuh"])
def test_a_missing_include_names_file_and_includer(tmp_path: Path, name: str) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "outside.cuh").write_text("")
    (tmp_path / "kernels/a.cu").write_text(f'#include "{name}"\n')
    with pytest.raises(CompileError, match=rf'"{name}", included by a.cu, is not a file in .*; write names relative'):
        included(KernelSpec("a.cu", "a", root=tmp_path / "kernels"))


def test_the_written_source_holds_every_file(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    tree(tmp_path / "in", a_cu='#include "ptx/mma.cuh"\n', ptx__mma_cuh="int mma;")
    main = write_source(source(KernelSpec("a.cu", "a", {"N": 3}, root=tmp_path / "in")), tmp_path / "out")
    assert main.read_text() == '#define N 3\n#include "a.cu"\n'
    assert (tmp_path / "out/ptx/mma.cuh").read_text() == "int mma;"
    assert main.name not in ("a.cu", "ptx/mma.cuh")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"arch": "compute_90"}, "compute_90"),
        ({"arch": "90"}, "'90'"),
        ({"constants": {"N M": 1}}, "'N M'"),
        ({"entry": "a<int>"}, "a<int>"),
    ],
)
def test_a_wrong_spec_is_refused(spec: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        KernelSpec(**{"file": "a.cu", "entry": "a", **spec})  # type: ignore[arg-type]
