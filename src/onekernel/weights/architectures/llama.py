"""Llama 1 to 3.x, and what uses its code: SmolLM2, TinyLlama, Yi."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onekernel.config import ModelConfig
from onekernel.weights.architectures.decoder import decoder
from onekernel.weights.architectures.fields import Fields

ARCHITECTURE = "LlamaForCausalLM"


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Llama config.json; `attention_bias` means biases on q, k, v and o."""
    fields = Fields(hf)
    bias = fields.flag("attention_bias", False)
    return decoder(
        fields, architecture=ARCHITECTURE, qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias", False)
    )
