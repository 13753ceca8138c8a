"""The way of each layer: chosen from counts, the same in every process, kept with a checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from onekernel.ops import training_gpu
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
    said: list[str] = []
    first_routes(model, told, CPU, said.append)
    assert said == []
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
    monkeypatch.setattr(routes, "takes_hidden", lambda hidden, device: True)
    monkeypatch.setattr(
        routes, "_placed", lambda sparse, hot, device: TrainingRoute("sparse" if sparse else "dense", hot)
    )
    gpu = World(0, 2, torch.device("cuda"), torch.bfloat16)
    model = random_model(LLAMA)
    choose_routes(model, SEEN, settings(tmp_path), gpu)
    assert asked == [(2 * 16, 32)] * 2
    assert ways(model) == [("sparse", [1, 2]), ("dense", None)]


def test_sizes_that_the_kernels_do_not_take_stay_dense_unless_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*told: object) -> TrainingRoute:
        raise AssertionError(told)

    monkeypatch.setattr(routes, "choose_route", never)
    monkeypatch.setattr(routes, "takes_hidden", lambda hidden, device: hidden < 32)
    gpu, said = World(0, 1, torch.device("cuda"), torch.bfloat16), list[str]()
    for asked, expected in (("auto", "dense"), ("sparse", "sparse")):
        model, told = random_model(LLAMA), settings(tmp_path, sparsity={"route": asked})
        first_routes(model, told, gpu, said.append)
        choose_routes(model, SEEN, told, gpu)
        assert ways(model) == [(expected, None)] * 2
    assert said == ["every layer stays dense: hidden_size 32 is more than the sparse kernels take on this GPU"]


@pytest.mark.parametrize(
    ("hidden", "kib", "taken"), [(8192, 227, True), (8193, 227, False), (6144, 99, True), (8192, 99, False)]
)
def test_what_the_kernels_take(hidden: int, kib: int, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_gpu, "facts", lambda name: SimpleNamespace(shared_bytes_per_block=kib * 1024))
    assert training_gpu.takes_hidden(hidden, torch.device("cuda", 1)) == taken


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
