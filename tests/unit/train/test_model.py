"""The model in training computes what the exported one does, and its penalty is the published one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from onekernel.config import ModelConfig, RopeScaling, Ternary
from onekernel.errors import UnsupportedModelError
from onekernel.models.load import load_weights
from onekernel.models.model import Model, Place
from onekernel.models.registry import model_config
from onekernel.ops.training_route import TrainingRoute, TrainingRouteName
from onekernel.phases.attention.cache import KVCache
from onekernel.phases.attention.rope import rope_table
from onekernel.text.vocab import Vocab
from onekernel.train.export import config_json, export
from onekernel.train.model import SparseLlama, initialise
from onekernel.train.vocabulary import train_vocabulary
from onekernel.weights.layout import expected_tensors
from onekernel.weights.open import open_checkpoint

LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=300,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    hidden_act="relu",
    tie_word_embeddings=True,
)
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 32)
CONFIGS = {
    "llama": LLAMA,
    "untied": replace(LLAMA, tie_word_embeddings=False, hidden_act="silu", num_key_value_heads=4),
    "biases": replace(LLAMA, qkv_bias=True, o_bias=True, hidden_act="relu2", rope_scaling=LLAMA3),
    "mistral": replace(LLAMA, architecture="MistralForCausalLM", sliding_window=64),
    "qwen2": replace(LLAMA, architecture="Qwen2ForCausalLM", qkv_bias=True, rope_theta=1e6),
    "qwen3": replace(LLAMA, architecture="Qwen3ForCausalLM", qk_norm=True, head_dim=16),
}


@pytest.fixture(scope="module")
def vocab() -> Vocab:
    return train_vocabulary(["the whale and the ship " * 40], 262, 10_000)


def random_model(config: ModelConfig) -> SparseLlama:
    """Weights that are bf16 already, so that an exported model has the same."""
    model = SparseLlama(config, 32)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, deviation = (1.0, 0.2) if "norm" in name else (0.0, 0.3)
            parameter.copy_(torch.empty(parameter.shape).normal_(mean, deviation, generator=draw).bfloat16())
    return model


def pieces(vocab_size: int = 300, batch: int = 3, length: int = 13) -> torch.Tensor:
    return torch.randint(0, vocab_size, (batch, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_exported_model_computes_the_same(name: str, tmp_path: Path, vocab: Vocab) -> None:
    model = random_model(CONFIGS[name])
    assert {key: tuple(p.shape) for key, p in model.named_parameters()} == expected_tensors(CONFIGS[name])
    export(tmp_path / "model", model, CONFIGS[name], vocab, write=True)
    checkpoint = open_checkpoint(str(tmp_path / "model"))
    config = model_config(checkpoint.settings.config)
    assert config == CONFIGS[name]
    weights = load_weights(checkpoint, config, dtype=torch.float32, device="cpu", progress=lambda done, total: None)
    there = Model(config, weights)
    for ids in pieces():
        place = Place(KVCache.allocate(config, 1, torch.float32, "cpu"), torch.tensor([0]), rope_table(config, 64), 0)
        torch.testing.assert_close(
            model.logits(ids[None])[0][0], there.logits(ids.tolist(), place), rtol=1e-4, atol=1e-4
        )


def test_published_sparse_architectures_become_those_that_state_their_activation() -> None:
    config = replace(LLAMA, architecture="SparseLlamaForCausalLM")
    assert model_config(config_json(config)) == LLAMA


@pytest.mark.parametrize("route", ["dense", "sparse"])
def test_the_penalty_is_summed_over_neurons_and_averaged_over_tokens_and_layers(route: TrainingRouteName) -> None:
    model = random_model(LLAMA)
    kept: list[torch.Tensor] = []
    for layer in model.layers:
        layer.mlp.route = TrainingRoute(route)
        layer.mlp.register_forward_pre_hook(lambda _, args: kept.append(args[0].detach()))
    losses = model(pieces())
    penalties = []
    for number, (layer, x) in enumerate(zip(model.layers, kept, strict=True)):
        gate, up = (x @ w.weight.T for w in (layer.mlp.gate_proj, layer.mlp.up_proj))
        penalties.append((gate.clamp(min=0) * up).abs().sum(-1).mean())
        assert losses.row_counts[number].tolist() == (gate > 0).flatten(0, 1).sum(1).tolist()
        assert losses.neuron_counts[number].tolist() == (gate > 0).flatten(0, 1).sum(0).tolist()
    torch.testing.assert_close(losses.penalty, torch.stack(penalties).mean())


@pytest.mark.parametrize(
    ("recompute", "route"), [(False, "dense"), (True, "dense"), (False, "sparse"), (True, "sparse")]
)
def test_the_penalty_has_a_gradient_on_every_way(recompute: bool, route: TrainingRouteName) -> None:
    """Moving a weight along its gradient changes loss and penalty by what the gradient says."""
    model = random_model(LLAMA)
    model.recompute = recompute
    for layer in model.layers:
        layer.mlp.route = TrainingRoute(route)
    losses = model(pieces())
    (losses.loss + 0.5 * losses.penalty).backward()
    weight = model.layers[0].mlp.up_proj.weight
    assert weight.grad is not None
    step = 1e-3 * weight.grad / weight.grad.norm()
    moved = [0.0, 0.0]
    with torch.no_grad():
        for place, sign in enumerate((1, -1)):
            weight += sign * step
            found = model(pieces())
            moved[place] = float(found.loss + 0.5 * found.penalty)
            weight -= sign * step
    assert (moved[0] - moved[1]) / 2 == pytest.approx(1e-3 * float(weight.grad.norm()), rel=0.05)


def test_silu_has_a_penalty_too_and_nearly_everything_is_active() -> None:
    model = random_model(replace(LLAMA, hidden_act="silu"))
    losses = model(pieces())
    assert float(losses.penalty.detach()) > 0
    assert min(int(rows.min()) for rows in losses.row_counts) == 48


def test_new_weights_depend_on_the_seed_alone() -> None:
    models = [SparseLlama(LLAMA, 32) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        initialise(model, seed)
    first, same, other = (model.get_parameter("model.layers.1.mlp.down_proj.weight") for model in models)
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert float(first.detach().std()) == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ternary": Ternary()}, "cannot be trained here"),
        ({"sub_norms": True}, "cannot be trained here"),
        ({"mlp_bias": True}, "have biases"),
        ({"sliding_window": 8}, "attends to a window of 8 tokens and pieces have 32"),
        ({"max_position_embeddings": 16}, r"data\.context is 32; the model allows 16"),
    ],
)
def test_what_cannot_be_trained_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        SparseLlama(replace(LLAMA, **changes), 32)
