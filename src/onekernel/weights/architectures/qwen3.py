"""Qwen3 (dense): RMS norms on each head's q and k, and a head_dim of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onekernel.config import ModelConfig
from onekernel.weights.architectures.decoder import decoder
from onekernel.weights.architectures.fields import Fields
from onekernel.weights.architectures.qwen2 import sliding_window

ARCHITECTURE = "Qwen3ForCausalLM"


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Qwen3 config.json; `attention_bias` means biases on q, k, v and o."""
    fields = Fields(hf)
    bias = fields.flag("attention_bias", False)
    return decoder(
        fields,
        architecture=ARCHITECTURE,
        head_dim=128,  # transformers' value for a config.json without the field
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        sliding_window=sliding_window(fields),
    )
