"""What config.json files of ternary models say, and what they leave to be known."""

from __future__ import annotations

from typing import Any

import pytest

from onekernel.config import ModelConfig, Ternary
from onekernel.errors import ConfigError, ModelError, UnsupportedModelError
from onekernel.weights.architectures import model_config
from onekernel.weights.architectures.ternary import scale_convention
from onekernel.weights.layout import expected_tensors

PLAIN: dict[str, Any] = {
    "architectures": ["BitNetForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
BITNET = {"quant_method": "bitnet"}


def test_bitnet_s_own_defaults() -> None:
    """Those of transformers' BitNetConfig, not of Llama's."""
    config = model_config(PLAIN)
    assert (config.hidden_act, config.rms_norm_eps, config.rope_theta) == ("relu2", 1e-5, 500000.0)
    assert config.sub_norms
    assert config.ternary == Ternary()
    stated = model_config(PLAIN | {"hidden_act": "silu", "rope_theta": 1e4, "rms_norm_eps": 1e-6})
    assert (stated.hidden_act, stated.rms_norm_eps, stated.rope_theta) == ("silu", 1e-6, 1e4)


def test_sub_norms_are_tensors_and_parameters() -> None:
    config = model_config(PLAIN)
    shapes = expected_tensors(config)
    assert shapes["model.layers.1.self_attn.attn_sub_norm.weight"] == (256,)
    assert shapes["model.layers.1.mlp.ffn_sub_norm.weight"] == (512,)
    without = model_config(PLAIN | {"architectures": ["LlamaForCausalLM"], "quantization_config": BITNET})
    assert config.layer_parameters - without.layer_parameters == 256 + 512


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_any_architecture_may_be_ternary(architecture: str) -> None:
    dense = PLAIN | {"architectures": [architecture]}
    assert model_config(dense).ternary is None
    assert model_config(dense | {"quantization_config": BITNET}).ternary == Ternary()
    with pytest.raises(UnsupportedModelError, match="quantised with AWQ"):
        model_config(dense | {"quantization_config": {"quant_method": "awq"}})


def test_the_scale_is_divided_by_unless_the_config_says_otherwise() -> None:
    """As in transformers, whose default is the older class."""
    assert scale_convention({"quantization_config": BITNET}) == "divide"
    assert scale_convention({"quantization_config": BITNET | {"linear_class": "bitlinear"}}) == "divide"
    assert scale_convention({"quantization_config": BITNET | {"linear_class": "autobitlinear"}}) == "multiply"


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"group_size": 96}, "group of ternary scales is 96"),
        ({"group_size": "128"}, "group_size is '128'; it must be a whole number"),
        ({"head": 8}, "head is 8; it must be a string"),
    ],
)
def test_what_cannot_be_is_named(stated: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        model_config(PLAIN | {"quantization_config": BITNET | stated})


def test_a_ternary_value_is_checked_where_it_is_made() -> None:
    with pytest.raises(ConfigError, match="must be dense, ternary or int8"):
        Ternary(head="int4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="q_size is 320, not a multiple of the ternary group of 128"):
        ModelConfig("x", 256, 512, 1, 5, 5, 64, 10, 10, ternary=Ternary(128))
