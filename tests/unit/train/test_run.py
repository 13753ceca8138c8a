"""A whole run: what it leaves, that a resumed one has the same losses, and that no failure costs a checkpoint."""

from __future__ import annotations

import errno
import importlib.util
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open

from onekernel import LLM, SamplingParams
from onekernel.errors import ConfigError, DeviceError, NumericError, TrainingError
from onekernel.train import checkpoint as checkpoints
from onekernel.train import export as exports
from onekernel.train.record import HeldOutReport, Report, StepReport, read_log
from onekernel.train.run import CHECKPOINT, Listener, train
from onekernel.train.settings import Settings
from onekernel.train.trainer import Trainer
from tests.unit.train.tiny import settings, write_text


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Killed(Exception):
    """Stands for a process that ends at once."""


def at_step(step: int, act: Callable[[], object]) -> Listener:
    """A listener that acts when the report of a step comes."""

    def report(report: Report) -> None:
        if isinstance(report, StepReport) and report.step == step:
            act()

    return Listener(report=report)


def kill() -> None:
    raise Killed


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The log without what a clock says."""
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in read_log(folder / "run" / "log.jsonl")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "run" / CHECKPOINT, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_a_run_leaves_a_model_that_has_learned_and_its_log(tmp_path: Path) -> None:
    heard: list[Report] = []
    asked = settings(tmp_path, run={"steps": 40, "evaluate_every": 20, "log_every": 10, "checkpoint_every": 0})
    outcome = train(asked, Listener(report=heard.append))
    steps = [report for report in heard if isinstance(report, StepReport)]
    held_out = [report for report in heard if isinstance(report, HeldOutReport)]
    assert [report.step for report in steps] == [10, 20, 30, 40]
    assert [report.step for report in held_out] == [20, 40]
    assert outcome.held_out == held_out
    assert (outcome.step, outcome.interrupted) == (40, False)
    assert held_out[-1].loss < min(held_out[0].loss, 3.5) < steps[0].loss < math.log(280)
    assert held_out[-1].perplexity == pytest.approx(math.exp(held_out[-1].loss))
    assert steps[-1].tokens == 40 * 4 * 16
    assert 0 < steps[-1].sparsity < 1
    assert 0 < held_out[-1].fullest[0] <= 48
    assert checkpoints.read_progress(tmp_path / "run" / CHECKPOINT).step == 40  # at the end there always is one
    kinds = [line["kind"] for line in read_log(tmp_path / "run" / "log.jsonl")]
    assert kinds == ["step", "step", "held_out", "step", "step", "held_out"]
    with LLM(str(outcome.model), device="cpu") as llm:
        assert llm.loaded.config.hidden_act == "relu"
        answer = llm.generate("whale ship", SamplingParams(max_tokens=4)).text
        assert answer.strip()


@pytest.mark.parametrize(("route", "renoise"), [("auto", 0.0), ("sparse", 0.1)])
def test_a_killed_run_goes_on_with_the_same_losses_and_weights(route: str, renoise: float, tmp_path: Path) -> None:
    asked = {}
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
        sparsity = {"route": route, "renoise": renoise, "l1": 1.0}  # much: neurons die
        asked[name] = settings(tmp_path / name, run={"micro_batch": 2}, sparsity=sparsity)
    train(asked["straight"])
    with pytest.raises(Killed):
        train(asked["killed"], at_step(5, kill))
    assert [line["step"] for line in numbers(tmp_path / "killed")] == [1, 2, 3, 4, 5]
    outcome = train(asked["killed"], resume=True)
    assert outcome.step == 6
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "straight")
    straight, resumed = weights(tmp_path / "straight"), weights(tmp_path / "killed")
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in straight.items())
    assert ("hot:0" in straight) == (route == "sparse")


def test_micro_batches_recomputed_layers_and_the_sparse_route_give_the_same_losses(tmp_path: Path) -> None:
    losses = []
    for number, (run, route) in enumerate(
        (({}, "dense"), ({"micro_batch": 1}, "dense"), ({"recompute": True}, "dense"), ({"recompute": True}, "sparse"))
    ):
        (tmp_path / str(number)).mkdir()
        asked = settings(tmp_path / str(number), run={**run, "checkpoint_every": 0}, sparsity={"route": route})
        train(asked)
        lines = numbers(tmp_path / str(number))
        assert lines[0].get("routes") == [route, route]
        losses.append([line["loss"] for line in lines])
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)


def test_bf16_products(tmp_path: Path) -> None:
    losses = {}
    for dtype in ("float32", "bfloat16"):
        (tmp_path / dtype).mkdir()
        train(settings(tmp_path / dtype, run={"dtype": dtype, "checkpoint_every": 0, "steps": 3}))
        losses[dtype] = [line["loss"] for line in numbers(tmp_path / dtype)]
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.01)


def test_ctrl_c_writes_a_checkpoint_after_the_step(tmp_path: Path) -> None:
    asked = settings(tmp_path, run={"checkpoint_every": 0})
    before = signal.getsignal(signal.SIGINT)
    outcome = train(asked, at_step(3, lambda: os.kill(os.getpid(), signal.SIGINT)))
    assert outcome.interrupted
    assert outcome.step in (3, 4)
    assert not outcome.model.exists()
    assert signal.getsignal(signal.SIGINT) is before
    assert train(asked, resume=True).step == 6


def test_neurons_are_counted_in_the_steps_that_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, step = [], Trainer._step

    def watched(self: Trainer, number: int, pieces: Any, **options: bool) -> None:
        counted.append(self._model.layers[0].mlp.count_neurons)
        if number == 4:
            os.kill(os.getpid(), signal.SIGINT)
        step(self, number, pieces, **options)

    monkeypatch.setattr(Trainer, "_step", watched)
    assert train(settings(tmp_path, run={"checkpoint_every": 0, "log_every": 3, "steps": 9})).step == 5
    assert counted == [False, False, True, False, False]
    first, last = numbers(tmp_path)
    assert (first["step"], last["step"]) == (3, 5)
    assert len(first["dead"]) == 2
    assert all(0 <= share < 1 for share in first["dead"])
    assert last["dead"] == []
    assert 0 < last["sparsity"] < 1


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(settings(tmp_path, run={"checkpoint_every": 0}), at_step(2, twice))
    assert not (tmp_path / "run" / CHECKPOINT).exists()


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    asked = settings(tmp_path)
    with pytest.raises(Killed):
        train(asked, at_step(4, kill))
    with pytest.raises(ConfigError, match="holds a run of 2 steps; go on with it by --resume"):
        train(asked)


def test_resume_without_a_checkpoint_begins(tmp_path: Path) -> None:
    assert train(settings(tmp_path, run={"steps": 1}), resume=True).step == 1


def test_a_text_that_changed_is_read_again_until_there_is_a_checkpoint(tmp_path: Path) -> None:
    asked = settings(tmp_path)
    with pytest.raises(Killed):
        train(asked, at_step(1, kill))
    tokens = tmp_path / "run" / "tokens" / "train.bin"
    before = tokens.read_bytes()
    write_text(tmp_path / "text.txt", seed=5)
    with pytest.raises(Killed):
        train(asked, at_step(4, kill))
    assert (again := tokens.read_bytes()) != before
    write_text(tmp_path / "text.txt", seed=6)
    train(asked, resume=True)
    assert tokens.read_bytes() == again


def test_a_run_that_is_done_says_so(tmp_path: Path) -> None:
    asked = settings(tmp_path, run={"steps": 2})
    train(asked)
    with pytest.raises(ConfigError, match=r"has done its 2 steps; raise run\.steps"):
        train(asked, resume=True)


def test_a_model_that_could_not_be_written_is_written_by_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    asked = settings(tmp_path, run={"steps": 2})
    monkeypatch.setattr(exports, "write_vocabulary", full)
    with pytest.raises(TrainingError, match=r"the model cannot be written to .*No space left on device\): make room"):
        train(asked)
    monkeypatch.undo()
    outcome = train(asked, resume=True)
    assert (outcome.step, len(outcome.held_out)) == (2, 1)
    assert (outcome.model / "model.safetensors").is_file()
    with pytest.raises(ConfigError, match="has done its 2 steps"):
        train(asked, resume=True)


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("run", {"seed": 7}, "run.seed is 7 and the run in .* has 0"),
        ("run", {"batch": 8}, "run.batch is 8"),
        ("data", {"context": 8}, "data.context is 8"),
        ("model", {"intermediate_size": 64}, "model.intermediate_size is 64"),
    ],
)
def test_what_would_be_another_run_is_refused(
    section: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    train(settings(tmp_path, run={"steps": 2}))
    kept = (tmp_path / "run" / CHECKPOINT).read_bytes()
    asked = {"run": {"steps": 4}} | {section: {"steps": 4, **changes} if section == "run" else changes}
    with pytest.raises(TrainingError, match=message):
        train(settings(tmp_path, **asked), resume=True)
    assert (tmp_path / "run" / CHECKPOINT).read_bytes() == kept


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings agree, the file does not: somebody copied it."""
    monkeypatch.setattr(Settings, "fixed", lambda self: {})
    train(settings(tmp_path, run={"steps": 2}))
    kept = (tmp_path / "run" / CHECKPOINT).read_bytes()
    message = (
        r"of a model of another shape: model\.layers\.0\.mlp\.down_proj\.weight is \(32, 48\) there and \(32, 64\)"
    )
    with pytest.raises(TrainingError, match=message):
        train(settings(tmp_path, run={"steps": 4}, model={"intermediate_size": 64}), resume=True)
    assert (tmp_path / "run" / CHECKPOINT).read_bytes() == kept


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    asked = settings(tmp_path, run={"steps": 4})
    train(settings(tmp_path, run={"steps": 2}))
    path = tmp_path / "run" / CHECKPOINT
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TrainingError, match=r"checkpoint\.safetensors is not a whole checkpoint"):
        train(asked, resume=True)


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = checkpoints.save_file

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        if json.loads(metadata["onekernel.run"])["step"] < 4:
            straight(tensors, path, metadata)
        else:
            path.write_bytes(b"a part")
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", full)
    asked = settings(tmp_path)
    with pytest.raises(TrainingError, match=r"No space left on device\); the one before is whole: make room"):
        train(asked)
    assert checkpoints.read_progress(tmp_path / "run" / CHECKPOINT).step == 2
    assert [path.name for path in (tmp_path / "run").glob("*.part")] == []
    monkeypatch.setattr(checkpoints, "save_file", straight)
    assert train(asked, resume=True).step == 6


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = Trainer._step

    def poisoned(self: Trainer, step: int, pieces: Any, **options: bool) -> None:
        if step == 3:
            with torch.no_grad():
                self._model.get_parameter("model.norm.weight").fill_(math.nan)
        straight(self, step, pieces, **options)

    monkeypatch.setattr(Trainer, "_step", poisoned)
    with pytest.raises(NumericError, match=r"loss became nan between steps 2 and 4; lower .*Last checkpoint: step 2"):
        train(settings(tmp_path, run={"log_every": 100}))
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path).values())


def test_a_model_is_trained_on_with_another_activation(tmp_path: Path) -> None:
    """What `onekernel sparsify` does: measured as it was, with ReLU, and after training."""
    first = settings(tmp_path, run={"steps": 30, "checkpoint_every": 0}, model={"hidden_act": "silu"})
    model = train(first).model
    told = {"directory": str(tmp_path / "second"), "steps": 30, "checkpoint_every": 10}
    asked = settings(tmp_path, run=told, sparsity={"l1": 1e-2})
    data = {"start": str(model), "hidden_act": "relu"}
    asked = type(asked)(run=asked.run, data=asked.data, model=type(asked.model)(**data), sparsity=asked.sparsity)
    outcome = train(asked)
    was, begun, ended = outcome.held_out
    assert [was.activation, begun.activation, ended.activation] == ["silu", "relu", "relu"]
    assert was.sparsity == 0 < begun.sparsity < ended.sparsity
    assert was.loss < begun.loss
    assert json.loads((outcome.model / "config.json").read_text())["hidden_act"] == "relu"
    with pytest.raises(ConfigError, match="has done its 30 steps"):
        train(asked, resume=True)


def test_a_batch_that_processes_cannot_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"has 4 pieces of a batch, not a multiple of run\.micro_batch, 3"):
        train(settings(tmp_path, run={"micro_batch": 3}))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"run\.batch is 4, not a multiple of the 3 processes"):
        train(settings(tmp_path))


def test_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"run\.device is 'tpu'; it must be auto, cpu"):
        train(settings(tmp_path, run={"device": "tpu"}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="there is no NVIDIA GPU"):
        train(settings(tmp_path, run={"device": "cuda"}))


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError, match=r"run\.directory .* cannot be made"):
        train(settings(tmp_path))


def test_the_picture_and_what_is_missing_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(settings(tmp_path, run={"steps": 2, "picture": True, "checkpoint_every": 0}))
    assert (tmp_path / "run" / "progress.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"picture needs matplotlib: pip install matplotlib"):
        train(
            settings(
                tmp_path, run={"directory": str(tmp_path / "other"), "steps": 2, "picture": True, "checkpoint_every": 0}
            )
        )


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = settings(tmp_path, run={"steps": 2, "tensorboard": True, "checkpoint_every": 0})
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"tensorboard needs tensorboard: pip install tensorboard"):
        train(asked)
    scalars: list[tuple[str, int]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert (Path(folder).name, purge_step) == ("tensorboard", 1)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars.append((name, step))

        def close(self) -> None:
            scalars.append(("closed", 0))

    fake = ModuleType("torch.utils.tensorboard")
    fake.__dict__["SummaryWriter"] = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    train(asked)
    assert {("step/loss", 1), ("step/sparsity", 2), ("held_out/perplexity", 2)} <= set(scalars)
    assert scalars[-1] == ("closed", 0)


def test_a_log_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert read_log(tmp_path / "log.jsonl") == [{"step": 1}, {"step": 2}]
    assert read_log(str(tmp_path / "none.jsonl")) == []


def test_a_text_that_is_damaged_is_named_and_nothing_is_begun(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    with (tmp_path / "text.txt").open("ab") as file:
        file.write(b"\xff")
    with pytest.raises(TrainingError, match=r"text\.txt is not UTF-8 text"):
        train(settings(tmp_path))
    assert not (tmp_path / "run" / "log.jsonl").exists()
