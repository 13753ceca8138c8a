"""The tensors to expect, against transformers; what a wrong checkpoint is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onekernel.errors import ModelError
from onekernel.weights.architectures import model_config
from onekernel.weights.checkpoint import CheckpointSettings, TensorInfo, TokenizerFiles
from onekernel.weights.layout import check_tensors, expected_tensors
from tests.unit.weights.tiny import CONFIG

MODEL = model_config(CONFIG)
TIED = model_config(CONFIG | {"tie_word_embeddings": True})
EMBEDDING = "model.embed_tokens.weight"


class Listed:
    """A checkpoint of names and shapes alone."""

    settings = CheckpointSettings("tiny", "dir/tiny", {}, {}, TokenizerFiles())

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.tensors = {name: TensorInfo(shape, "BF16", 0) for name, shape in shapes.items()}

    def read(self, name: str) -> torch.Tensor:
        raise AssertionError("checking reads nothing")

    def close(self) -> None:
        pass


@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Mistral", {"head_dim": 24}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 24}),
        ("Qwen3", {"attention_bias": True}),
    ],
)
def test_names_and_shapes_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    import transformers

    values = CONFIG | changes | {"architectures": [f"{family}ForCausalLM"]}
    plain = {name: value for name, value in values.items() if name not in ("architectures", "rope_theta")}
    with torch.device("meta"):
        made = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**plain))
    assert expected_tensors(model_config(values)) == {n: tuple(t.shape) for n, t in made.state_dict().items()}


def test_a_tied_head_is_not_expected_and_parameters_add_up() -> None:
    assert "lm_head.weight" not in expected_tensors(TIED)
    for model in (MODEL, TIED):
        assert sum(torch.Size(shape).numel() for shape in expected_tensors(model).values()) == model.parameters


def test_a_whole_checkpoint_passes_with_harmless_extras() -> None:
    shapes = expected_tensors(TIED)
    shapes["model.layers.0.self_attn.rotary_emb.inv_freq"] = (8,)
    check_tensors(TIED, Listed(shapes))
    check_tensors(TIED, Listed(shapes | {"lm_head.weight": (50, 64)}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.norm.weight": None}, r"dir/tiny .* model.norm.weight of shape \(64,\) is missing"),
        ({"lm_head.weight": None}, r"lm_head.weight of shape \(50, 64\) is missing"),
        ({"model.layers.2.mlp.up_proj.weight": (96, 64)}, r"layers.2.mlp.up_proj.weight of shape \(96, 64\) is not"),
        ({EMBEDDING: (64, 64)}, r"embed_tokens.weight has shape \(64, 64\) where the config asks for \(50, 64\)"),
        ({f"model.layers.{layer}.x": (1,) for layer in range(7)}, "layers.4.x of shape .*; and 2 more"),
    ],
)
def test_a_wrong_tensor_is_named_with_both_shapes(changes: dict[str, Any], words: str) -> None:
    shapes = expected_tensors(MODEL) | changes
    with pytest.raises(ModelError, match=words):
        check_tensors(MODEL, Listed({name: shape for name, shape in shapes.items() if shape is not None}))


def test_a_stored_tied_head_of_another_shape_is_named() -> None:
    with pytest.raises(ModelError, match=r"lm_head.weight has shape \(51, 64\)"):
        check_tensors(TIED, Listed(expected_tensors(TIED) | {"lm_head.weight": (51, 64)}))
