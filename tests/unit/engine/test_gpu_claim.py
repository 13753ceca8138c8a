"""Two processes on one GPU, which here is only a name."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onekernel.engine.gpu_claim import claim_gpu, mps_runs
from onekernel.errors import DeviceError

UUID = "GPU-3f0b7c1e-0000-0000-0000-000000000001"

CLAIM = """
import sys
from pathlib import Path
from onekernel.engine.gpu_claim import claim_gpu
claim = claim_gpu(sys.argv[1], folder=Path(sys.argv[2]), mps=False)
print("claimed", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the GPU."""
    command = [sys.executable, "-c", CLAIM, UUID, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "claimed\n"
        yield process
        process.kill()


@pytest.mark.complaint("K4", file="engine/gpu_claim.py", old="if owner != str(os.getpid()):", new="if False:")
def test_a_second_process_is_warned_with_the_pid_of_the_first(
    other: subprocess.Popen[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    claim_gpu(UUID, folder=tmp_path, mps=False).close()
    assert f"process {other.pid} uses {UUID} too" in caplog.text
    assert len(caplog.records) == 1


def test_under_mps_it_is_refused_by_name(other: subprocess.Popen[str], tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=rf"process {other.pid} .*Multi-Process Service \(MPS\).*--backend reference"):
        claim_gpu(UUID, folder=tmp_path, mps=True)


def test_another_gpu_is_free(other: subprocess.Popen[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    claim_gpu("GPU-2", folder=tmp_path, mps=True).close()
    assert not caplog.records


def test_a_process_that_was_killed_has_let_it_go(
    other: subprocess.Popen[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other.kill()
    other.wait()
    claim_gpu(UUID, folder=tmp_path, mps=True).close()
    assert not caplog.records


def test_engines_of_one_process_share_it_and_closing_lets_it_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (claim_gpu(UUID, folder=tmp_path, mps=True) for _ in range(2))
    assert (tmp_path / "gpus" / f"{UUID}.lock").read_text() == f"{os.getpid()}\n"
    second.close()
    first.close()
    first.close()
    claim_gpu(UUID, folder=tmp_path, mps=True).close()
    assert not caplog.records


def test_a_file_in_the_folder_s_place_is_no_obstacle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "gpus").write_text("")
    with caplog.at_level(logging.INFO, logger="onekernel"):
        claim_gpu(UUID, folder=tmp_path).close()
    assert "other processes on it are not seen" in caplog.text


def test_mps_is_found_by_its_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not mps_runs()
    os.mkfifo(tmp_path / "control")
    assert mps_runs()
