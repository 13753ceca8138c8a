"""`onekernel train` and `onekernel sparsify`: what they print, and their exit codes."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

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

    def interrupted(self: Trainer, step: int, pieces: Any) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        straight(self, step, pieces)

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
    ],
)
def test_what_is_wrong_is_one_line(
    sections: dict[str, Any], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", config(tmp_path, **sections)]) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


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
