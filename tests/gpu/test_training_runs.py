"""Whole training runs on real GPUs: the same losses after an interruption, on every route, and over two by NCCL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from onekernel.train.record import StepReport, read_log
from onekernel.train.run import Listener, train
from onekernel.train.settings import Settings, settings_from
from tests.unit.train.tiny import toml, values, write_text

pytestmark = pytest.mark.timeout(280)

MODEL = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2}


class Killed(Exception):
    """Stands for a process that ends at once."""


def told(folder: Path, route: str, **run: Any) -> dict[str, dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    write_text(folder / "text.txt", 8000)
    more = {"device": "cuda", "steps": 20, "batch": 8, "micro_batch": 2, "checkpoint_every": 6, **run}
    return values(folder, run=more, model=MODEL, data={"context": 128}, sparsity={"l1": 1e-2, "route": route})


def asked(folder: Path, route: str, **run: Any) -> Settings:
    return settings_from(told(folder, route, **run))


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_log(folder / "run" / "log.jsonl")]


def killed_after(step: int) -> Listener:
    def report(report: Any) -> None:
        if isinstance(report, StepReport) and report.step == step:
            raise Killed

    return Listener(report=report)


@pytest.mark.parametrize("route", ["auto", "dense", "sparse"])
def test_a_run_that_goes_on_has_the_same_losses(route: str, tmp_path: Path) -> None:
    train(asked(tmp_path / "straight", route))
    with pytest.raises(Killed):
        train(asked(tmp_path / "killed", route), killed_after(15))
    train(asked(tmp_path / "killed", route), resume=True)
    assert losses(tmp_path / "killed") == losses(tmp_path / "straight")
    assert losses(tmp_path / "straight")[-1] < losses(tmp_path / "straight")[0] - 1


@pytest.mark.parametrize("run", [{"compile": True}, {"recompute": True}], ids=["compiled", "recomputed"])
def test_other_ways_to_compute_give_much_the_same(run: dict[str, Any], tmp_path: Path) -> None:
    train(asked(tmp_path / "plain", "dense"))
    train(asked(tmp_path / "other", "sparse", **run))
    assert losses(tmp_path / "other") == pytest.approx(losses(tmp_path / "plain"), rel=0.02)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_gpus_have_the_losses_of_one(parallel: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("no GPU beside the first one")
    train(asked(tmp_path / "one", "sparse"))
    folder = tmp_path / "two"
    folder.mkdir()
    (folder / "run.toml").write_text(toml(told(folder, "sparse", parallel=parallel)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29631"]
    done = subprocess.run(
        [*command, "-m", "onekernel", "train", str(folder / "run.toml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert losses(folder) == pytest.approx(losses(tmp_path / "one"), rel=0.02)
