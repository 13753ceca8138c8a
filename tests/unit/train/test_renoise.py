"""Dead neurons get noise on their gates, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from onekernel.train.model import SparseLlama, initialise
from onekernel.train.record import read_log
from onekernel.train.renoise import DEVIATION, renoise
from onekernel.train.run import train
from onekernel.train.settings import new_model
from tests.unit.train.tiny import settings

SHARE = 0.1


@pytest.fixture
def model(tmp_path: Path) -> SparseLlama:
    config = replace(new_model(settings(tmp_path), 280), hidden_size=64, intermediate_size=400)
    model = SparseLlama(config, 16)
    initialise(model, 0)
    return model


def counts(model: SparseLlama) -> list[torch.Tensor]:
    """Every third neuron of the first layer is dead, none of the second."""
    first = torch.arange(model.config.intermediate_size) % 3
    return [first, torch.ones_like(first)]


def test_gates_of_dead_neurons_move_towards_noise(model: SparseLlama) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    renoise(model, counts(model), SHARE, seed=3, step=7)
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert changed == ["model.layers.0.mlp.gate_proj.weight"]
    was, now = before[changed[0]], model.state_dict()[changed[0]]
    dead = counts(model)[0] == 0
    assert torch.equal(now[~dead], was[~dead])
    noise = (now[dead] - (1 - SHARE) * was[dead]) / SHARE
    assert float(noise.mean()) == pytest.approx(0, abs=DEVIATION / 20)  # 8,600 values
    assert float(noise.std()) == pytest.approx(DEVIATION, rel=0.05)


def test_the_noise_is_a_function_of_seed_and_step(model: SparseLlama) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def after(seed: int, step: int) -> torch.Tensor:
        model.load_state_dict(before)
        renoise(model, counts(model), SHARE, seed=seed, step=step)
        return model.state_dict()["model.layers.0.mlp.gate_proj.weight"].clone()

    assert torch.equal(after(0, 1), after(0, 1))
    others = [after(0, 2), after(1, 1), after(1 << 32, 1)]
    assert not any(torch.equal(after(0, 1), other) for other in others)


def test_dead_neurons_live_again(tmp_path: Path) -> None:
    """The gates of a run that a penalty killed stay where they are; with noise some neurons are active again."""
    dead = {}
    for name, share in (("without", 0.0), ("with", 0.3)):
        (tmp_path / name).mkdir()
        told = {"l1": 100.0, "l1_warm_up": 0, "renoise": share}
        train(settings(tmp_path / name, run={"steps": 25, "checkpoint_every": 0}, sparsity=told))
        lines = [line for line in read_log(tmp_path / name / "run" / "log.jsonl") if line["kind"] == "step"]
        assert all(len(line["dead"]) == 2 for line in lines)
        dead[name] = sum(sum(line["dead"]) / 2 for line in lines[-5:]) / 5
    assert dead["without"] > 0.8
    assert dead["with"] < 0.8 * dead["without"]
