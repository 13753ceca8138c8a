"""The wheel: one for every platform, with everything that the source tree has, and usable on its own."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import onekernel

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", *options, str(ROOT)], check=True)
    [path] = folder.glob("*.whl")
    return path


def test_one_wheel_fits_every_python_torch_and_cuda(wheel: Path) -> None:
    assert wheel.name == f"onekernel-{onekernel.__version__}-py3-none-any.whl"


def test_it_holds_every_file_of_the_source(wheel: Path) -> None:
    source = ROOT / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in (source / "onekernel").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if name.startswith("onekernel/")} == expected
    assert {path.rpartition(".")[2] for path in expected} >= {"py", "json", "cu", "cuh", "typed"}
    licenses = {Path(name).name for name in names if ".dist-info/licenses/" in name}
    assert licenses == {"LICENSE", "NOTICE"}


def test_it_works_unpacked_in_another_place(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    program = """
import onekernel
from onekernel.weights.shipped import read_shipped, shipped_configs
print(onekernel.__file__, [read_shipped(name)["hidden_size"] > 0 for name in shipped_configs()])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(str(tmp_path))
    assert "True" in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "onekernel", "--version"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"onekernel {onekernel.__version__}"
