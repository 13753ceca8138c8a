"""Training as users start it: the shipped example, two processes, kill -9, and a real model made sparse.

What others are compared with is trained in this process, which has imported everything already.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from onekernel.cli.main import main
from onekernel.models.registry import check_tensors, model_config
from onekernel.train.record import read_log
from onekernel.train.run import CHECKPOINT
from onekernel.weights.open import open_checkpoint
from tests.unit.train.tiny import toml, values, write_text

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow

STATED_LOSS = 4.5
"""Of the example after its 300 steps, on text it was not trained on; a unigram model's is over 5."""


def onekernel(*arguments: str | Path, before: tuple[str, ...] = (), **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *before, "-m", "onekernel", *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE, **options
    )


def finished(process: subprocess.Popen[str], code: int = 0) -> str:
    out, err = process.communicate(timeout=280)
    assert process.returncode == code, err
    return out


def here(*arguments: str | Path) -> None:
    """The same command in this process."""
    torch.set_num_threads(1)
    assert main([*map(str, arguments)]) == 0


KILLING = {"l1": 30.0, "renoise": 0.3}
"""Neurons die within a few steps, and are brought back."""


def write_run(folder: Path, **run: Any) -> Path:
    folder.mkdir(exist_ok=True)
    write_text(folder / "text.txt")
    (folder / "run.toml").write_text(toml(values(folder, run=run, sparsity=KILLING)))
    return folder / "run.toml"


def numbers(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in read_log(folder / "run" / "log.jsonl")]


def test_the_example_reaches_the_stated_loss_and_transformers_loads_it(tmp_path: Path) -> None:
    told = (ROOT / "examples" / "train-sparse.toml").read_text()
    (tmp_path / "run.toml").write_text(told.replace("runs/moby-dick", str(tmp_path / "run")))
    out = finished(onekernel("train", tmp_path / "run.toml", cwd=ROOT))
    last = read_log(tmp_path / "run" / "log.jsonl")[-1]
    assert last["kind"] == "held_out"
    assert last["loss"] < STATED_LOSS
    assert last["sparsity"] > 0.85
    assert (tmp_path / "run" / "progress.png").exists()
    model = out.splitlines()[-1].removeprefix("model: ")

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from onekernel import LLM, SamplingParams

    tokenizer, oracle = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model).float()
    ids = tokenizer("The whale and the ship", return_tensors="pt").input_ids
    there = oracle.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()
    with LLM(model, device="cpu", dtype="float32") as llm:
        answer = llm.generate("The whale and the ship", SamplingParams(max_tokens=12, temperature=0))
    assert list(answer.token_ids) == there[: len(answer.token_ids)]


def test_a_run_that_was_killed_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    straight, killed = (write_run(tmp_path / name, steps=40, checkpoint_every=7) for name in ("straight", "killed"))
    here("train", straight)
    process = onekernel("train", killed)
    log, patience = tmp_path / "killed" / "run" / "log.jsonl", time.monotonic() + 200
    while len(read_log(log)) < 10 and time.monotonic() < patience:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(read_log(log)) < 40
    here("train", killed, "--resume")
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "straight")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one process reports."""
    folder = tmp_path_factory.mktemp("one")
    here("train", write_run(folder, steps=8, micro_batch=1))
    found = numbers(folder)
    assert max(map(max, (line["dead"] for line in found))) > 0.5
    return found


def by_two(*arguments: str | Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port)
    finished(onekernel("train", *arguments, before=torchrun))


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert [(line["kind"], line["step"]) for line in ours] == [(line["kind"], line["step"]) for line in theirs]
    for line, expected in zip(ours, theirs, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert line["sparsity"] == pytest.approx(expected["sparsity"], abs=1e-3)


def test_two_processes_have_the_losses_of_one(alone: list[dict[str, Any]], tmp_path: Path) -> None:
    by_two(write_run(tmp_path, steps=8, micro_batch=1, parallel="ddp"))
    compare(numbers(tmp_path), alone)


def test_two_processes_share_a_model_and_its_checkpoint(alone: list[dict[str, Any]], tmp_path: Path) -> None:
    """A run of FSDP2 that ends early and goes on, on the sparse route; its checkpoint is that of one process."""
    config = write_run(tmp_path, steps=4, micro_batch=1, parallel="fsdp2", checkpoint_every=4)
    early = config.read_text().replace("[sparsity]", '[sparsity]\nroute = "sparse"')
    later = early.replace("steps = 4", "steps = 8").replace("checkpoint_every = 4", "checkpoint_every = 6")
    config.write_text(early)
    by_two(config)
    config.write_text(later)
    by_two(config, "--resume")
    found = numbers(tmp_path)
    assert [line["step"] for line in found] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    compare(found[:2], alone[:2])  # the rate rises; how it falls depends on the length of the run
    assert found[-1]["loss"] < found[0]["loss"]
    with safe_open(tmp_path / "run" / CHECKPOINT, framework="pt") as whole:
        assert tuple(whole.get_slice("exp_avg:model.layers.1.mlp.up_proj.weight").get_shape()) == (48, 32)


def test_smollm2_is_made_sparse(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Five steps: the way from the real GGUF to a ReLU model; a GPU run is what makes it good."""
    flags = ["--text", ROOT / "examples" / "moby-dick.txt", "--steps", "5", "--context", "32", "--batch", "2"]
    flags += ["--held-out-pieces", "4", "--checkpoint-every", "0", "--device", "cpu", "--warm-up", "1"]
    out = finished(onekernel("sparsify", smollm2_gguf, tmp_path / "run", *flags))
    was, begun, ended = (line for line in read_log(tmp_path / "run" / "log.jsonl") if line["kind"] == "held_out")
    assert was["activation"] == "silu"
    assert was["perplexity"] < 100
    assert was["sparsity"] < 0.01 < 0.3 < begun["sparsity"]
    assert ended["loss"] < begun["loss"]
    model = Path(out.splitlines()[-1].removeprefix("model: "))
    assert json.loads((model / "config.json").read_text())["hidden_act"] == "relu"
    assert (model / "chat_template.jinja").exists()
    checkpoint = open_checkpoint(str(model))
    check_tensors(model_config(checkpoint.settings.config), checkpoint)
