"""The way of each layer: chosen from counts, the same in every process, kept with a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onekernel.ops.sparse_training import LayerSparsity, Sparsity, TrainingRoute
from onekernel.train import routes
from onekernel.train.checkpoint import Progress, load_checkpoint, save_checkpoint
from onekernel.train.routes import choose_routes, first_routes
from onekernel.train.trainer import adamw
from onekernel.train.world import World
from tests.unit.train.test_model import LLAMA, random_model
from tests.unit.train.tiny import settings

CPU = World(0, 1, torch.device("cpu"), torch.float32)
SEEN = Sparsity(tuple(LayerSparsity(64, 1.0, 3, torch.arange(48)) for _ in range(2)))


def ways(model: routes.SparseLlama) -> list[tuple[str, list[int] | None]]:
    found = [layer.mlp.route for layer in model.layers]
    return [(route.name, None if route.hot is None else route.hot.tolist()) for route in found]


@pytest.mark.parametrize("asked", ["auto", "dense", "sparse"])
def test_on_a_cpu_only_a_forced_way_is_sparse(asked: str, tmp_path: Path) -> None:
    model, told = random_model(LLAMA), settings(tmp_path, sparsity={"route": asked})
    expected = [("sparse" if asked == "sparse" else "dense", None)] * 2
    first_routes(model, told)
    assert ways(model) == expected
    choose_routes(model, SEEN, told, CPU)
    assert ways(model) == expected


def test_on_a_gpu_the_fastest_is_taken_for_what_a_process_computes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def choose(seen: LayerSparsity, tokens: int, hidden: int) -> TrainingRoute:
        asked.append((tokens, hidden))
        return TrainingRoute("sparse", torch.tensor([1, 2])) if len(asked) == 1 else TrainingRoute()

    monkeypatch.setattr(routes, "choose_route", choose)
    monkeypatch.setattr(
        routes, "_placed", lambda sparse, hot, device: TrainingRoute("sparse" if sparse else "dense", hot)
    )
    gpu = World(0, 2, torch.device("cuda"), torch.bfloat16)
    model = random_model(LLAMA)
    choose_routes(model, SEEN, settings(tmp_path), gpu)
    assert asked == [(2 * 16, 32)] * 2
    assert ways(model) == [("sparse", [1, 2]), ("dense", None)]


def test_a_checkpoint_keeps_the_ways(tmp_path: Path) -> None:
    model, told = random_model(LLAMA), settings(tmp_path)
    optimizer = adamw(model, told)
    kept: list[TrainingRoute] = [TrainingRoute("sparse", torch.tensor([3, 5])), TrainingRoute("sparse")]
    for layer, route in zip(model.layers, kept, strict=True):
        layer.mlp.route = route
    save_checkpoint(tmp_path / "c", model, optimizer, Progress(3, 7, {}), write=True)
    for route in (TrainingRoute(), TrainingRoute("sparse")):
        model.layers[0].mlp.route = model.layers[1].mlp.route = route
        assert load_checkpoint(tmp_path / "c", model, optimizer) == Progress(3, 7, {})
        assert ways(model) == [("sparse", [3, 5]), ("sparse", None)]
