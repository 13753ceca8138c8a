"""Published sparse checkpoints: every stored layout is read as what it is, ReLU is used, and a model of them runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from onekernel.cli.main import main
from onekernel.config import ModelConfig
from onekernel.errors import ModelError, UnsupportedModelError
from onekernel.models.load import load_weights
from onekernel.models.model import Model, Place
from onekernel.phases.attention.cache import KVCache
from onekernel.phases.attention.rope import rope_table
from onekernel.text.tokenizer import placeholder
from onekernel.weights.architectures import model_config
from onekernel.weights.open import open_checkpoint
from tests.unit.weights.tiny import CONFIG, tensors, write_config

SPARSE: dict[str, Any] = {
    **CONFIG,
    "architectures": ["SparseLlamaForCausalLM"],
    "model_type": "llama_sparse_relu",
    "hidden_act": "silu",
    "intermediate_size": 64,  # as the hidden size: no shape shows how a matrix lies
    "sparsity_gated_mlp": True,
    "sparsity_l1_coeff": 2e-5,
    "tie_word_embeddings": True,
}

Write = Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]


def as_trained(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    for part, transposed in (("gate", True), ("up", False), ("down", True)):
        if name.endswith(f"mlp.{part}_proj.weight"):
            return name.replace("_proj.weight", "_weight"), tensor.t().contiguous() if transposed else tensor
    return name, tensor


def for_kernels(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    for part in ("gate", "up", "down"):
        if name.endswith(f"mlp.{part}_proj.weight"):
            stored = name.replace(f"{part}_proj.weight", part.upper())
            return stored, tensor.t().contiguous() if part == "down" else tensor
    return name, tensor


def as_linear(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    return name, tensor


LAYOUTS = [as_trained, for_kernels, as_linear]


def write(folder: Path, layout: Write, config: dict[str, Any] = SPARSE) -> dict[str, torch.Tensor]:
    """Write random weights as the published files lie, with the training's statistics beside them."""
    write_config(folder, config)
    plain = tensors(config)
    stored = dict(layout(name, tensor) for name, tensor in plain.items())
    stored["model.layers.0.mlp.tracker.last_activated"] = torch.zeros(64)
    stored["metrics_accumulator.counts"] = torch.zeros(1)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return plain


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.complaint(
    "L7",
    file="weights/published_sparse.py",
    old='"mlp.down_weight": ("mlp.down_proj.weight", Layout.TRANSPOSED)',
    new='"mlp.down_weight": ("mlp.down_proj.weight", Layout.AS_LINEAR)',
)
def test_every_layout_is_read_as_what_it_is(tmp_path: Path, layout: Write) -> None:
    plain = write(tmp_path, layout)
    checkpoint = open_checkpoint(str(tmp_path))
    assert set(checkpoint.tensors) == set(plain)
    for name, tensor in plain.items():
        assert torch.equal(checkpoint.read(name), tensor), name
        assert checkpoint.tensors[name].shape == tuple(tensor.shape)
    assert checkpoint.settings.notes == ("trained with ReLU, whatever hidden_act in its config.json says",)
    checkpoint.close()


def test_shapes_are_those_of_the_weight_not_of_the_file(tmp_path: Path) -> None:
    write(tmp_path, as_trained, {**SPARSE, "intermediate_size": 96})
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.tensors["model.layers.1.mlp.gate_proj.weight"].shape == (96, 64)
    assert checkpoint.tensors["model.layers.1.mlp.down_proj.weight"].shape == (64, 96)


def logits(folder: Path) -> torch.Tensor:
    checkpoint = open_checkpoint(str(folder))
    config: ModelConfig = model_config(checkpoint.settings.config)
    weights = load_weights(checkpoint, config, dtype=torch.float32, device="cpu", progress=lambda done, total: None)
    model = Model(config, weights)
    cache = KVCache.allocate(config, 1, torch.float32, "cpu")
    return model.logits([3, 1, 4, 1, 5], Place(cache, torch.zeros(1, dtype=torch.int64), rope_table(config, 5), 0))


def test_a_model_of_any_layout_is_the_relu_llama_of_the_same_weights(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    plain = {**SPARSE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "relu"}
    write_config(tmp_path / "plain", plain)
    save_file(tensors(plain), tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    want = logits(tmp_path / "plain")
    assert want.std() > 0
    for layout in LAYOUTS:
        folder = tmp_path / layout.__name__
        folder.mkdir()
        write(folder, layout)
        assert torch.equal(logits(folder), want)


@pytest.mark.parametrize(
    ("changes", "architecture", "inner"),
    [
        ({}, "SparseLlamaForCausalLM", 64),
        ({"architectures": ["LlamaForCausalLM"]}, "SparseLlamaForCausalLM", 64),
        ({"model_type": "llama"}, "SparseLlamaForCausalLM", 64),
        ({"model_type": "qwen2_sparse_relu"}, "SparseQwen2ForCausalLM", 64),
        ({"sparsity_new_intermediate_size": 128}, "SparseLlamaForCausalLM", 128),
        ({"sparsity_new_intermediate_size": None}, "SparseLlamaForCausalLM", 64),
    ],
)
def test_the_config_means_relu_whatever_it_says(changes: dict[str, Any], architecture: str, inner: int) -> None:
    config = model_config({**SPARSE, **changes})
    assert (config.architecture, config.hidden_act, config.intermediate_size) == (architecture, "relu", inner)
    assert config.qkv_bias == ("Qwen2" in architecture)


def test_a_model_without_gates_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="has no gate"):
        model_config({**SPARSE, "sparsity_gated_mlp": False})


def test_a_weight_that_is_stored_twice_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, SPARSE)
    names = ("model.layers.0.mlp.DOWN", "model.layers.0.mlp.down_weight")
    save_file({name: torch.zeros(64, 64) for name in names}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"stores model.layers.0.mlp.down_proj.weight twice, as .*; keep one"):
        open_checkpoint(str(tmp_path))


def test_generate_runs_one_on_the_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same text as the plain model's, from the command line, on any machine."""
    texts = []
    for layout in (as_trained, as_linear):
        folder = tmp_path / layout.__name__
        folder.mkdir()
        write(folder, layout)
        placeholder(SPARSE["vocab_size"]).backend.save(str(folder / "tokenizer.json"))
        command = ["generate", "-m", str(folder), "-p", "1 2 3", "-n", "8", "--temp", "0", "--device", "cpu"]
        assert main(command) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].strip()
