"""A Llama's config.json so small that random weights for it take no time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


def write_tiny(folder: Path, **changes: Any) -> Path:
    """Write the config.json, with some fields changed, and return its folder."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder
