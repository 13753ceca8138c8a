"""The first BitNet b1.58 models (1bitLLM large and 3B): like BitNet, but SiLU, and masters in fp16 or fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onekernel.config import ModelConfig
from onekernel.errors import UnsupportedModelError
from onekernel.weights.architectures.decoder import decoder
from onekernel.weights.architectures.fields import Fields

ARCHITECTURE = "BitnetForCausalLM"

SUB_NORMS = {"self_attn.inner_attn_ln": "self_attn.attn_sub_norm", "mlp.ffn_layernorm": "mlp.ffn_sub_norm"}
"""Their names for the sub-norms -> those of transformers' BitNet."""


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json; `weight_bits` 1 means ternary, `input_bits` are those of the activations."""
    fields = Fields(hf)
    for name, built_in in (("weight_bits", 1), ("input_bits", 8)):
        if (bits := fields.whole(name, built_in)) != built_in:
            raise UnsupportedModelError(f"{name} is {bits}, which is not built in; only {built_in} is")
    return decoder(fields, architecture=ARCHITECTURE, sub_norms=True, always_ternary=True)
