"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onekernel.config import ModelConfig
from onekernel.errors import UnsupportedModelError
from onekernel.weights.architectures.decoder import decoder
from onekernel.weights.architectures.fields import Fields

ARCHITECTURE = "Qwen2ForCausalLM"

_DEFAULT_MAX_WINDOW_LAYERS = 28  # transformers' value for a config.json without the field


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Qwen2 config.json."""
    fields = Fields(hf)
    return decoder(fields, architecture=ARCHITECTURE, qkv_bias=True, sliding_window=sliding_window(fields))


def sliding_window(config: Fields) -> int | None:
    """Return the window of the layers that have one, or None if every layer attends to everything.

    `layer_types` decides if it is there (transformers 5), else layers from `max_window_layers` on have a window.
    """
    types = config.names("layer_types")
    if types is not None:
        if unknown := set(types) - {"full_attention", "sliding_attention"}:
            raise UnsupportedModelError(
                f"layer_types has {', '.join(sorted(unknown))}, which is not built in; use vLLM or transformers"
            )
        return config.whole("sliding_window") if "sliding_attention" in types else None
    first = config.whole("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS, low=0)
    if not config.flag("use_sliding_window", False) or first >= config.whole("num_hidden_layers"):
        return None
    return config.whole("sliding_window")
