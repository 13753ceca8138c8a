"""The shipped configs are those of the published models."""

from __future__ import annotations

import math

import pytest

from onekernel.models.registry import check_tensors, expected_tensors, model_config, shipped_configs
from onekernel.weights.open import open_checkpoint

PARAMETERS = {
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
    "SmolLM2-1.7B": 1_711_376_384,
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120,
}
"""As the models' safetensors files have them."""

TERNARY_PARAMETERS = {
    "Falcon-E-3B-Base": 3_053_586_432,
    "Falcon3-7B-Instruct-1.58bit": 7_455_550_464,
    "Llama3-8B-1.58-100B-tokens": 8_030_261_248,
    "Ternary-Qwen3-1.7B": 1_720_574_976,
    "bitnet-b1.58-2B-4T": 2_412_820_480,
    "bitnet_b1_58-3B": 3_324_387_840,
    "bitnet_b1_58-large": 728_842_752,
}
"""What the configs make, before packing; the models' cards round them to 3, 7.46, 8, 1.72, 2.4, 3.3 and 0.7 billion."""


@pytest.mark.parametrize("name", shipped_configs())
def test_a_shipped_config_has_the_published_number_of_parameters(name: str) -> None:
    checkpoint = open_checkpoint(name, load_format="dummy")
    config = model_config(checkpoint.settings.config)
    check_tensors(config, checkpoint)
    assert config.parameters == (PARAMETERS | TERNARY_PARAMETERS)[name]
    assert sum(math.prod(shape) for shape in expected_tensors(config).values()) == config.parameters
    assert (config.ternary is not None) == (name in TERNARY_PARAMETERS)


def test_every_published_model_of_the_tables_is_shipped() -> None:
    assert set(shipped_configs()) >= set(PARAMETERS)


@pytest.mark.parametrize(
    ("name", "head_dim", "context", "theta", "factor"),
    [
        ("Llama-3.2-1B", 64, 131072, 5e5, 32.0),
        ("Llama-3.1-8B", 128, 131072, 5e5, 8.0),
        ("Qwen3-0.6B", 128, 40960, 1e6, 1.0),
        ("Qwen2.5-0.5B", 64, 32768, 1e6, 1.0),
        ("SmolLM2-135M", 64, 8192, 1e5, 1.0),
        ("Mistral-7B-v0.3", 128, 32768, 1e6, 1.0),
    ],
)
def test_what_parameters_do_not_show(name: str, head_dim: int, context: int, theta: float, factor: float) -> None:
    config = model_config(open_checkpoint(name, load_format="dummy").settings.config)
    assert (config.head_dim, config.max_position_embeddings, config.rope_theta) == (head_dim, context, theta)
    assert config.rope_scaling.factor == factor
    assert config.sliding_window is None
