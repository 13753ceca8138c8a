"""Mistral 7B and its kin: Llama without biases, up to v0.1 with a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onekernel.config import ModelConfig
from onekernel.weights.architectures.decoder import decoder
from onekernel.weights.architectures.fields import Fields

ARCHITECTURE = "MistralForCausalLM"


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Mistral config.json; every layer has the same `sliding_window`, or none if it is null."""
    fields = Fields(hf)
    return decoder(fields, architecture=ARCHITECTURE, sliding_window=fields.whole_or_none("sliding_window"))
