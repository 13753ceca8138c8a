"""`onekernel train` and `onekernel sparsify`: what they print, and their exit codes."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from onekernel.cli import sparsify
from onekernel.cli.main import main
from onekernel.train.trainer import Trainer
from tests.unit.train.tiny import toml, values, write_text


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def config(folder: Path, **sections: dict[str, Any]) -> str:
    write_text(folder / "text.txt")
    (folder / "run.toml").write_text(toml(values(folder, **sections)))
    return str(folder / "run.toml")


def test_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", config(tmp_path)]) == 0
    out, err = capsys.readouterr()
    perplexity, model = out.splitlines()
    assert perplexity.startswith("held-out perplexity ")
    assert perplexity.endswith("% of neurons dead")
    assert model == f"model: {tmp_path / 'run' / 'model'}"
    lines = err.splitlines()
    assert lines[0] == "training a tokenizer of 280 tokens"
    assert " tokens to train on, " in lines[1]
    assert lines[2].endswith("parameters on 1 x cpu")
    assert lines[3].startswith("step 1/6: loss ") and lines[3].endswith(" tok/s")
    assert f"try it: onekernel generate {shlex.quote(str(tmp_path / 'run' / 'model'))} " in lines[-1]
    assert main(["generate", str(tmp_path / "run" / "model"), "-p", "whale", "-n", "2", "--device", "cpu"]) == 0


def test_ctrl_c_says_how_to_go_on_and_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config(tmp_path)
    straight = Trainer._step

    def interrupted(self: Trainer, step: int, pieces: Any, **options: bool) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        straight(self, step, pieces, **options)

    monkeypatch.setattr(Trainer, "_step", interrupted)
    assert main(["train", path]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    told = (
        f"interrupted after step 3; its checkpoint is written, go on with: onekernel train {shlex.quote(path)} --resume"
    )
    assert err.splitlines()[-1] == told
    monkeypatch.setattr(Trainer, "_step", straight)
    assert main(["train", path, "--resume"]) == 0
    assert "going on after step 3 of 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sections", "code", "message"),
    [
        ({"run": {"stepz": 1}}, 2, "there is no key run.stepz; did you mean run.steps?"),
        ({"data": {"train": ["/no/such/text"]}}, 2, "there is no /no/such/text"),
        ({"data": {"context": 4000}}, 1, "one piece takes 4001; give more text, or a smaller data.context"),
        ({"tokenizer": {"vocab_size": 9000}}, 1, "9000 were asked for; set tokenizer.vocab_size to"),
        ({"tokenizer": {"directory": "/no/such"}}, 1, "tokenizer.json is missing"),
        ({"model": {"num_attention_heads": 3}}, 2, "not a multiple of model.num_attention_heads, 3"),
        ({"model": {"hidden_act": "silu"}, "sparsity": {"renoise": 0.1}}, 2, "model.hidden_act silu, whose neurons do"),
    ],
)
def test_what_is_wrong_is_one_line(
    sections: dict[str, Any], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", config(tmp_path, **sections)]) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


def test_dimensions_are_looked_at_before_anything_takes_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", config(tmp_path, model={"num_key_value_heads": 3})]) == 2
    (only,) = capsys.readouterr().err.splitlines()
    assert only == "error: num_attention_heads is 4, not a multiple of num_key_value_heads, 3"
    assert not (tmp_path / "run" / "tokenizer").exists()


@pytest.mark.parametrize("name", ["model", "tokenizer", "tokens"])
def test_a_file_in_the_place_of_a_folder_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("a file")
    assert main(["train", config(tmp_path)]) == 2
    told = (
        f"error: {tmp_path / 'run' / name} is a file and must become a folder; move it, or give another run.directory"
    )
    assert capsys.readouterr().err.splitlines() == [told]


def test_a_penalty_that_kills_all_neurons_ends_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, run={"steps": 30, "checkpoint_every": 0}, sparsity={"l1": 1000.0, "l1_warm_up": 0})
    assert main(["train", path]) == 0
    out, err = capsys.readouterr()
    assert ", 100.0 % zeros, 100.0 % of neurons dead" in out
    assert "warning: no neuron of any layer is active any more" in err
    assert "a smaller l1 than 1000, a longer warm-up of it, or renoise" in err


def test_the_folder_of_a_run_is_no_model_but_holds_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", config(tmp_path, run={"steps": 2})]) == 0
    run = tmp_path / "run"
    capsys.readouterr()
    assert main(["generate", str(run), "-p", "whale", "--device", "cpu"]) == 1
    told = f"error: {run} is the folder of a training run; its model is {run / 'model'}: give that"
    assert capsys.readouterr().err.splitlines() == [told]
    (run / "model" / "config.json").unlink()
    assert main(["generate", str(run), "-p", "whale", "--device", "cpu"]) == 1
    assert f"has not ended; go on with it by --resume, then give {run / 'model'}" in capsys.readouterr().err


def test_sparsify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = {"steps": 20, "checkpoint_every": 0}
    assert main(["train", config(tmp_path, run=told, model={"hidden_act": "silu"})]) == 0
    capsys.readouterr()
    model, folder = str(tmp_path / "run" / "model"), tmp_path / "sparse"
    flags = [
        "--text",
        str(tmp_path / "text.txt"),
        "--context",
        "16",
        "--batch",
        "4",
        "--steps",
        "20",
        "--device",
        "cpu",
    ]
    flags += ["--l1", "1e-2", "--learning-rate", "3e-3", "--warm-up", "2", "--l1-warm-up", "5", "--micro-batch", "2"]
    assert main(["sparsify", model, str(folder), *flags]) == 0
    out, err = capsys.readouterr()
    before = [line for line in err.splitlines() if line.startswith("step 0: held-out perplexity")]
    assert [line.partition(" with ")[2].partition(",")[0] for line in before] == ["silu", "relu"]
    assert out.splitlines()[-1] == f"model: {folder / 'model'}"
    assert json.loads((folder / "model" / "config.json").read_text())["hidden_act"] == "relu"
    assert main(["info", str(folder / "model")]) == 0


def test_sparsify_refuses_what_it_cannot_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = str(write_text(tmp_path / "text.txt"))
    assert main(["sparsify", "/no/model", str(tmp_path / "out"), "--text", text, "--device", "cpu"]) == 1
    assert "there is no file or directory '/no/model'" in capsys.readouterr().err


def test_sparsify_speaks_of_its_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, folder = str(write_text(tmp_path / "text.txt")), str(tmp_path / "out")

    def told(*flags: str) -> str:
        assert main(["sparsify", "/no/model", folder, "--text", text, *flags]) == 2
        return capsys.readouterr().err.splitlines()[-1]

    assert told("--steps", "0") == "error: --steps is 0; expected int >= 1"
    assert told("--renoise", "2") == "error: --renoise is 2.0; expected float <= 1.0"
    assert told("--device", "tpu") == "error: --device is 'tpu'; it must be auto, cpu, cuda or cuda:N"
    assert told("--batch", "4", "--micro-batch", "3").endswith("not a multiple of --micro-batch, 3")
    (tmp_path / "out").write_text("a file")
    assert told() == f"error: DIRECTORY {folder} cannot be made: File exists"


def test_every_key_that_sparsify_sets_has_its_flag() -> None:
    parser = argparse.ArgumentParser()
    sparsify.add_arguments(parser)
    flags = {name for action in parser._actions for name in (*action.option_strings, action.metavar)}
    args = parser.parse_args(["MODEL", "DIRECTORY", "--text", "FILE"])
    told = sparsify._settings(args)
    for key, flag in sparsify._FLAGS.items():
        section, name = key.split(".")
        assert hasattr(getattr(told, section), name)
        assert flag in flags
    assert (
        sparsify.in_flags("lower optimizer.learning_rate, not run.toml or a.b")
        == "lower --learning-rate, not run.toml or a.b"
    )
