"""The benchmark of ternary products runs to its end on the CPU, so that its GPU time is spent on measuring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.ternary import main


@pytest.mark.slow
@pytest.mark.usefixtures("host_compiler")
def test_every_kind_of_row_is_written(tmp_path: Path) -> None:
    out = tmp_path / "ternary.json"
    assert main(["--shim", "--commit", "abc", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["commit"] == "abc"
    assert {"command", "date", "device", "driver", "torch", "read_gbps"} <= set(found)
    rows = found["rows"]
    assert {(row["kind"], row["layout"]) for row in rows} == {
        ("gemv", "tensor_core"),
        ("gemv", "blocks16x32"),
        ("prefill", "tensor_core"),
    }
    for row in rows:
        assert {"kind", "layout", "batch", "us", "reference", "reference_us", "gpu_mb", "floor_us"} <= set(row)
        assert ("shape" in row) != ("model" in row)
        assert row["us"]["p10"] <= row["us"]["median"] <= row["us"]["p90"]
        assert row["speedup"] == pytest.approx(row["reference_us"]["median"] / row["us"]["median"])
    chosen = [(row["layout"], row["shape"], row["batch"]) for row in rows if row.get("chosen")]
    assert len(chosen) == len(set(chosen))
    assert sum("model" in row for row in rows) == 1
    assert len([row for row in rows if row.get("shape") == "48x512" and row["batch"] == 1]) > 4  # several builds


def test_a_run_without_time_measures_only_the_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.ternary.read_gbps", lambda *_: 4500.0)
    out = tmp_path / "ternary.json"
    assert main(["--shim", "--seconds", "0", "--out", str(out)]) == 0
    assert not out.exists()


@pytest.mark.parametrize("arguments", [["--seconds", "soon"], ["--gpu"]])
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
