"""BitNet b1.58 as transformers has it (2B-4T): sub-norms before o_proj and down_proj, squared ReLU, ternary weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onekernel.config import ModelConfig
from onekernel.weights.architectures.decoder import decoder
from onekernel.weights.architectures.fields import Fields

ARCHITECTURE = "BitNetForCausalLM"

_DEFAULTS = {"hidden_act": "relu2", "rms_norm_eps": 1e-5, "rope_theta": 500000.0}  # transformers' for absent fields


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a BitNet config.json; without a quantization_config its weights are masters in bf16."""
    given = {name: value for name, value in hf.items() if value is not None}
    fields = Fields(_DEFAULTS | given)
    bias = fields.flag("attention_bias", False)
    return decoder(fields, architecture=ARCHITECTURE, qkv_bias=bias, o_bias=bias, sub_norms=True, always_ternary=True)
