"""The training benchmark: its rows have what the results' format asks for, and unknown kinds are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import training
from benchmarks.training_runs import GPU_MODEL, one_by_one, plan, run_row, steps_for
from onekernel.train.settings import new_model
from tests.unit.train.tiny import write_text

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
    assert "--kinds has decode; it takes ffn_step, model_step, run, with a comma" in capsys.readouterr().err


def test_two_runs_are_compared_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    text, out, png = write_text(tmp_path / "text.txt"), tmp_path / "training.json", tmp_path / "curves" / "both.png"
    flags = ["--cpu", "--kinds", "run", "--steps", "10", "--text", str(text), "--l1", "0.5", "--commit", "abc"]
    assert training.main([*flags, "--out", str(out), "--png", str(png)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row.keys() >= SIDES | {"kind", "hidden_size", "intermediate_size", "tokens", "speedup", "relative_error"}
    assert (row["kind"], row["steps"], row["l1"], row["text"]) == ("run", 10, 0.5, "text.txt")
    assert row["loss_gap"] == pytest.approx(row["held_out_loss"] - row["dense_held_out_loss"])
    assert row["nonzero_fraction"] == pytest.approx(1 - row["sparsity"])
    assert row["train_curve"][0][1] == pytest.approx(row["dense_train_curve"][0][1], rel=1e-6)  # the same beginning
    assert row["train_curve"][-1][1:] != row["dense_train_curve"][-1][1:]
    assert [point[0] for point in row["held_out_curve"]] == [64 * step for step in range(1, 11)]
    assert row["ms"]["repeats"] == row["dense_tokens_per_s"]["repeats"] == 9
    assert row["mj_per_token"] is None
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "loss gap" in capsys.readouterr().out


@pytest.mark.slow
def test_two_runs_at_once_are_those_one_by_one(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    asked = plan(text, cpu=True, seconds=1.0, steps=3, l1=0.5, png=None, at_once=True)
    row = run_row(asked, training.CPU, None)
    alone = one_by_one(asked, training.CPU, 3, None)
    assert [row["dense_held_out_loss"], row["held_out_loss"]] == [side["held_out_loss"] for side in alone]
    assert row["ms"] is row["dense_ms"] is row["speedup"] is row["mj_per_token"] is None
    assert "at once, error" in training.line(row)


def test_the_steps_of_a_run_are_those_that_fit_into_its_time(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    short, long = (plan(text, cpu=True, seconds=seconds, steps=None, l1=None, png=None) for seconds in (1e-6, 1e4))
    assert steps_for(short, "cpu") == 2
    assert steps_for(long, "cpu") > 2


def test_the_gpus_run_is_a_model_of_its_size(tmp_path: Path) -> None:
    asked = plan(tmp_path / "text.txt", cpu=False, seconds=240.0, steps=None, l1=None, png=None)
    dense, ours = (asked.settings(tmp_path, "cuda:0", 100, l1) for l1 in (0.0, asked.l1))
    assert (dense.sparsity.route, ours.sparsity.route) == ("dense", "auto")
    assert dense.fixed() == ours.fixed()
    config = new_model(ours, asked.vocab)
    assert config.hidden_size == GPU_MODEL["hidden_size"]
    assert 0.1e9 < config.parameters < 0.2e9


def test_energy_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        training.main(["--cpu", "--energy"])
    assert "--energy reads a GPU's counter" in capsys.readouterr().err
