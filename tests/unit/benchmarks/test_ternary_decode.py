"""The benchmark of ternary models in the megakernel runs on a CPU and leaves the rows of other benchmarks alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from onekernel.measure.results import rows_of_kinds

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str) -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    subprocess.run(
        [sys.executable, "benchmarks/ternary_decode.py", *arguments],
        cwd=ROOT,
        env=environment,
        check=True,
        timeout=600,
    )


def test_every_side_has_a_row_and_other_rows_stay(tmp_path: Path) -> None:
    out = tmp_path / "ternary.json"
    out.write_text(
        json.dumps({"rows": [{"kind": "gemv", "shape": "1x1"}, {"kind": "decode", "model": "x", "prompt_tokens": 9}]})
    )
    run("--tiny", "--repeats", "1", "--commit", "abc", "--out", str(out))
    found = json.loads(out.read_text())
    assert found["commit"] == "abc"
    rows = found["rows"]
    assert rows[:2] == [{"kind": "gemv", "shape": "1x1"}, {"kind": "decode", "model": "x", "prompt_tokens": 9}]
    assert [row["head"] for row in rows[2:]] == ["bf16", "int8", "bf16", "bf16"]
    dense = rows[4]
    assert dense["speedup"] == 1
    for row in rows[2:]:
        assert row["backend"] == "reference" and (row["prompt_tokens"], row["new_tokens"]) == (6, 4)
        assert row["bytes_per_token"] > 0 and row["us_per_token"]["median"] > 0
        assert row["speedup"] == pytest.approx(
            dense["us_per_token"]["median"] / row["us_per_token"]["median"], abs=1e-3
        )
    assert [row["kind"] for row in rows_of_kinds(out, ("gemv",))] == ["gemv"]
    assert rows_of_kinds(tmp_path / "none.json", ("gemv",)) == []
