"""config.json in its spellings -> ModelConfig; what is refused, and with which words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onekernel.config import RopeScaling
from onekernel.errors import ModelError, UnsupportedModelError
from onekernel.weights.architectures import ARCHITECTURES, model_config
from tests.unit.weights.tiny import CONFIG

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


def config(architecture: str = "Llama", **changes: Any) -> dict[str, Any]:
    return CONFIG | {"architectures": [f"{architecture}ForCausalLM"]} | changes


@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize(
    ("family", "values", "expected"),
    [
        ("Llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
         {"rope_theta": 5e5, "rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 64)}),
        ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
         {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("Mistral", {"sliding_window": 32}, {"sliding_window": 32}),
        ("Mistral", {"sliding_window": None}, {"sliding_window": None}),
        ("Qwen2", {}, {"qkv_bias": True, "o_bias": False, "qk_norm": False, "sliding_window": None}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}, {"sliding_window": 32}),
        ("Qwen3", {"head_dim": 24, "dtype": "float32"},
         {"qk_norm": True, "qkv_bias": False, "head_dim": 24, "dtype": "float32"}),
    ],
)  # fmt: skip
def test_reads_what_transformers_writes(family: str, values: dict[str, Any], expected: dict[str, Any]) -> None:
    import transformers

    plain = {name: value for name, value in CONFIG.items() if name not in ("architectures", "rope_theta")}
    written = getattr(transformers, f"{family}Config")(**plain | values).to_json_string()
    read = model_config(json.loads(written) | {"architectures": [f"{family}ForCausalLM"]})
    for name in (*REQUIRED, "num_key_value_heads", "rms_norm_eps"):
        assert getattr(read, name) == CONFIG[name]
    for name, value in expected.items():
        assert getattr(read, name) == value


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("absent", [True, False])
def test_a_missing_field_is_named(name: str, absent: bool) -> None:
    hf = config()
    del hf[name]
    if not absent:
        hf[name] = None
    with pytest.raises(ModelError, match=f"config.json has no {name}"):
        model_config(hf)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; it must be a finite number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
        ({"hidden_act": ["silu"]}, "hidden_act is .* it must be a string"),
        ({"rope_scaling": 2.0}, "rope_scaling is 2.0; it must be an object"),
        ({"dtype": "float64"}, "the dtype is 'float64'"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, not a multiple of num_key_value_heads, 3"),
        ({"head_dim": None, "hidden_size": 65}, "has no head_dim"),
        ({"head_dim": 15}, "head_dim is 15; it must be even"),
        ({"architectures": []}, r"architectures is \[\]; it must name one"),
        ({"architectures": None}, "architectures is None"),
        ({"rope_scaling": {"rope_type": "linear"}}, "config.json's rope_scaling has no factor"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor is 4.0"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        model_config(config(**changes))


@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, RopeScaling()),
        ({"rope_theta": None}, 1e4, RopeScaling()),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, 1e4, RopeScaling("linear", 4.0)),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 1e4, RopeScaling("dynamic", 2.0)),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 1e4, RopeScaling("llama3", 8.0, 1.0, 4.0, 64)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}, "rope_theta": None}, 1e6,
         RopeScaling("linear", 4.0)),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 3e4}, 3e4, RopeScaling()),
    ],
)  # fmt: skip
def test_rope_in_both_spellings(fields: dict[str, Any], theta: float, scaling: RopeScaling) -> None:
    read = model_config(config(**fields))
    assert (read.rope_theta, read.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 0}, None),
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}, None),
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}, 32),
        ({"use_sliding_window": True, "sliding_window": 32}, None),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 32}, None),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 32}, 32),
    ],
)
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_a_window_counts_only_where_a_layer_has_it(family: str, fields: dict[str, Any], window: int | None) -> None:
    assert model_config(config(family, **fields)).sliding_window == window


def test_absent_fields_take_transformers_values() -> None:
    hf = {name: config("Qwen3")[name] for name in ("architectures", *REQUIRED)}
    read = model_config(hf)
    assert (read.head_dim, read.num_key_value_heads, read.rms_norm_eps) == (128, 4, 1e-6)
    assert (read.hidden_act, read.tie_word_embeddings, read.dtype) == ("silu", False, "bfloat16")
    assert model_config(hf | {"architectures": ["LlamaForCausalLM"]}).head_dim == 16


@pytest.mark.parametrize("spelling", [{"torch_dtype": "float16"}, {"dtype": "float16"}, {"dtype": "torch.float16"}])
def test_dtype_in_its_spellings(spelling: dict[str, Any]) -> None:
    assert model_config(config(**spelling)).dtype == "float16"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM: mixtures of experts .* use vLLM or llama.cpp"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "mixtures of experts"),
        ({"architectures": ["Qwen2_5_VLForConditionalGeneration"]}, "images, audio or an encoder .* text-only model"),
        ({"architectures": ["BertModel"]}, "BertModel: it is not built in; known are LlamaForCausalLM, .*Qwen3"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised with AWQ, .* use the original bf16"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "with GPTQ"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "with bitsandbytes"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "with compressed-tensors"),
        ({"quantization_config": {"quant_method": "fp8"}}, "with fp8"),
        ({"quantization_config": {"quant_method": "exl2"}}, "with EXL2"),
        ({"quantization_config": {"quant_method": "hqq"}}, "with 'hqq'"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "with MLX"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn', .* known are default, linear"),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "'mrope'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        model_config(config(**changes))


def test_other_layer_types_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        model_config(config("Qwen2", layer_types=["full_attention", "chunked_attention"]))


def test_every_architecture_says_its_own_name() -> None:
    for name in ARCHITECTURES:
        assert model_config(config() | {"architectures": [name]}).architecture == name
