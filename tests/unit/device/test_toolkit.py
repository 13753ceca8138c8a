"""The compiler is the one of torch's CUDA major, and its exact version is known without loading it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onekernel.device import toolkit
from onekernel.device.toolkit import default_toolkit, find_toolkit
from onekernel.errors import CompileError


def wheels(folder: Path, major: int, nvrtc: str, runtime: str) -> None:
    suffix = "" if major == 13 else "-cu12"
    lib, include = {13: ("cu13/lib", "cu13/include"), 12: ("cuda_nvrtc/lib", "cuda_runtime/include")}[major]
    for path in (f"nvidia/{lib}/libnvrtc.so.{major}", f"nvidia/{include}/cuda_bf16.h"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("")
    for project, version in (("nvidia-cuda-nvrtc", nvrtc), ("nvidia-cuda-runtime", runtime)):
        info = folder / f"{(project + suffix).replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project + suffix}\nVersion: {version}\n")


@pytest.fixture(autouse=True)
def without_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "find_nvcc", lambda: None)


def test_each_major_has_its_own_folders(tmp_path: Path) -> None:
    wheels(tmp_path, 13, "13.0.88", "13.0.96")
    wheels(tmp_path, 12, "12.8.93", "12.8.90")
    newest, older = find_toolkit(folders=[str(tmp_path)]), find_toolkit([12], [str(tmp_path)])
    assert (newest.version, newest.major) == ("13.0.88 (headers 13.0.96)", 13)
    assert (older.version, older.major) == ("12.8.93 (headers 12.8.90)", 12)
    assert older.nvrtc == tmp_path / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
    assert older.include == tmp_path / "nvidia/cuda_runtime/include"


def test_a_toolkit_beside_nvcc_does_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bin/nvcc", "lib64/libnvrtc.so.13.0.88", "include/cuda_bf16.h"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "lib64/libnvrtc.so.13").symlink_to("libnvrtc.so.13.0.88")
    monkeypatch.setattr(toolkit, "find_nvcc", lambda: tmp_path / "bin/nvcc")
    assert find_toolkit(folders=[]).version == "13.0.88"


def test_what_is_missing_is_named_with_the_command() -> None:
    with pytest.raises(
        CompileError, match=r"libnvrtc.so.13 .* 'nvidia-cuda-nvrtc==13\.\*' 'nvidia-cuda-runtime==13\.\*'"
    ):
        find_toolkit(folders=[])
    with pytest.raises(CompileError, match=r"libnvrtc.so.12 .* 'nvidia-cuda-nvrtc-cu12==12\.\*'"):
        find_toolkit([12], [])


def test_the_major_is_that_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels(tmp_path, 13, "13.0.88", "13.0.96")
    wheels(tmp_path, 12, "12.8.93", "12.8.90")
    monkeypatch.setattr(toolkit.sys, "path", [str(tmp_path)])
    found = {}
    for version in ("12.8", "13.0", None):
        monkeypatch.setattr(torch.version, "cuda", version)
        found[version] = default_toolkit.__wrapped__().major
    assert found == {"12.8": 12, "13.0": 13, None: 13}
