"""The training benchmark: its rows have what the results' format asks for, and unknown kinds are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import training

SIDES = {"ms", "dense_ms", "peak_mb", "dense_peak_mb", "mj_per_token", "dense_mj_per_token"}


def test_it_runs_on_a_cpu_and_writes_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "training.json"
    assert training.main(["--cpu", "--out", str(out), "--commit", "abc", "--kinds", "ffn_step,model_step"]) == 0
    document = json.loads(out.read_text())
    assert document["commit"] == "abc"
    rows = document["rows"]
    assert [row["kind"] for row in rows] == ["ffn_step", "ffn_step", "model_step"]
    for row in rows:
        assert row.keys() >= SIDES | {"kind", "pattern", "hidden_size", "intermediate_size", "tokens", "hot_neurons"}
        assert 0 < row["nonzero_fraction"] < 0.5
        assert row["ms"]["repeats"] == row["dense_ms"]["repeats"] == 2
        assert row["speedup"] == pytest.approx(row["dense_ms"]["median"] / row["ms"]["median"])
        assert row["relative_error"] < 0.01
        assert row["mj_per_token"] is None
        assert row["peak_mb"] is None
    assert [row.get("route") for row in rows] == ["sparse", "dense", None]
    assert (rows[2]["model"], rows[2]["sparse_layers"]) == ("tiny", 2)
    assert capsys.readouterr().out.count("error 0.0") == 3


def test_unknown_kinds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        training.main(["--kinds", "ffn_step,decode"])
    assert "--kinds has decode; it takes ffn_step, model_step, with a comma" in capsys.readouterr().err
