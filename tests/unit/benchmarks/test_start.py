"""The benchmark of a process's first token writes a model, answers from it and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]


def test_a_row_for_each_model(tmp_path: Path) -> None:
    out, folder = tmp_path / "start.json", tmp_path / "models"
    arguments = ["--models", "SmolLM2-135M", "--layers", "1", "--device", "cpu", "--repeats", "1", "--commit", "abc"]
    subprocess.run(
        [sys.executable, "benchmarks/start.py", *arguments, "--folder", str(folder), "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])},
        check=True,
        timeout=300,
    )
    found = json.loads(out.read_text())
    assert (found["commit"], found["device"]) == ("abc", "CPU")
    (row,) = found["rows"]
    assert row["model"] == "SmolLM2-135M" and row["weights_gb"] == 0.06
    assert 0 < row["first_token_s"]["median"] <= row["end_s"]["median"]
    assert not list(folder.iterdir())
