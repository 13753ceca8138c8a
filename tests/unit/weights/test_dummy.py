"""Random weights: the same everywhere, and a model whose text and activations are fit to test and time with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from onekernel.errors import ModelError, UnsupportedModelError
from onekernel.models.load import load_weights
from onekernel.models.model import Model, Place
from onekernel.phases.attention.cache import KVCache
from onekernel.phases.attention.rope import rope_table
from onekernel.weights.architectures import model_config
from onekernel.weights.checkpoint import CheckpointSettings, TokenizerFiles
from onekernel.weights.dummy import DummyCheckpoint
from onekernel.weights.layout import check_tensors
from tests.unit.weights.tiny import CONFIG

SMALL = CONFIG | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 512}


def dummy(config: dict[str, Any]) -> DummyCheckpoint:
    return DummyCheckpoint(CheckpointSettings("dummy", "config.json", config, {}, TokenizerFiles()))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small matrices: waking a second thread for each costs more than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_values_depend_on_the_name_alone() -> None:
    one, other = dummy(CONFIG), dummy(CONFIG | {"num_hidden_layers": 1})
    names = list(other.tensors)
    first = {name: one.read(name) for name in names}
    for name in reversed(names):
        assert torch.equal(other.read(name), first[name])
    same_shape = [first[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "kv"]
    assert not torch.equal(*same_shape)


def test_values_are_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    whole = dummy(CONFIG).read(name)
    assert whole.flatten()[:4].tolist() == [-0.208984375, -0.068359375, 0.08056640625, 0.1826171875]
    monkeypatch.setattr("onekernel.weights.dummy._CHUNK_VALUES", 1000)
    assert torch.equal(dummy(CONFIG).read(name), whole)


def test_tensors_are_bf16_of_the_expected_shapes_and_sizes() -> None:
    checkpoint = dummy(SMALL)
    check_tensors(model_config(SMALL), checkpoint)
    for name, info in checkpoint.tensors.items():
        values = checkpoint.read(name)
        assert (values.dtype, tuple(values.shape), values.nbytes) == (torch.bfloat16, info.shape, info.stored_bytes)
        if values.ndim == 2:
            assert (
                abs(float(values.float().mean())) < 3 * float(values.float().std()) / math.sqrt(values.numel()) + 1e-5
            )
        elif not name.endswith("bias"):
            assert float(values.float().mean()) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, UnsupportedModelError, "mixtures of experts"),
        ({"vocab_size": None}, ModelError, "has no vocab_size"),
    ],
)
def test_a_config_that_no_model_can_be_made_of(config: dict[str, Any], error: type[ModelError], words: str) -> None:
    with pytest.raises(error, match=words):
        dummy(CONFIG | config)


def test_a_tensor_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(ModelError, match=r"a LlamaForCausalLM has no tensor model.layers.9.x"):
        dummy(CONFIG).read("model.layers.9.x")


def generate(config: dict[str, Any], prompt: list[int], count: int) -> tuple[list[int], torch.Tensor, list[float]]:
    """Return greedy tokens, the last logits and the residual's root mean square after each layer."""
    checkpoint, model_size = dummy(config), model_config(config)
    weights = load_weights(checkpoint, model_size, dtype=torch.float32, device="cpu", progress=lambda done, total: None)
    model = Model(model_size, weights)
    total = len(prompt) + count
    cache = KVCache.allocate(model_size, -(-total // 64), torch.float32, "cpu")
    table, rope = torch.arange(cache.num_pages), rope_table(model_size, total)
    model.extend(prompt[:-1], Place(cache, table, rope, 0))
    tokens = prompt[:]
    for position in range(len(prompt) - 1, total - 1):
        logits = model.logits(tokens[-1:], Place(cache, table, rope, position))[0]
        tokens.append(int(logits.argmax()))
    acts, sizes = model.start(tokens[:16]), []
    with torch.inference_mode():
        for phase in model.phases:
            model.run(phase, acts, Place(cache, table, rope, 0))
            if phase.name == "down":
                sizes.append(float(acts.residual.square().mean().sqrt()))
    return tokens[len(prompt) :], logits, sizes


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Qwen2", {"vocab_size": 256}),
        ("Qwen3", {"head_dim": 48}),
        ("Llama", {"num_hidden_layers": 16}),
        ("Mistral", {"num_hidden_layers": 1, "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}),
    ],
)
def test_greedy_text_does_not_loop_and_activations_keep_their_size(
    family: str, changes: dict[str, Any], tied: bool
) -> None:
    config = SMALL | {"architectures": [f"{family}ForCausalLM"], "tie_word_embeddings": tied} | changes
    for prompt in ([3, 1, 4, 1, 5, 9, 2, 6], [7, 7]):
        tokens, logits, sizes = generate(config, prompt, 128)
        assert len(set(tokens)) >= 32
        repeated = sum(one == other for one, other in itertools.pairwise(tokens))
        assert repeated < 16
        assert 0.5 < float(logits.std()) < 2.0
        # Each layer adds about as much as the one before, so that sizes grow as the square root of the depth.
        assert all(0.3 < size / math.sqrt(layer) < 1.5 for layer, size in enumerate(sizes, start=1))
