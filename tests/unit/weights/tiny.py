"""A tiny Llama's config.json and tensors, and the files made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from onekernel.weights.architectures import model_config
from onekernel.weights.layout import expected_tensors

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def tensors(config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return random tensors of every name that the config asks for."""
    draw = torch.Generator().manual_seed(0)
    shapes = expected_tensors(model_config(config))
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}


def write_config(folder: Path, config: dict[str, Any] = CONFIG) -> None:
    """Write config.json."""
    (folder / "config.json").write_text(json.dumps(config))


def write_model(folder: Path, config: dict[str, Any] = CONFIG) -> dict[str, torch.Tensor]:
    """Write config.json and model.safetensors, and return the tensors."""
    write_config(folder, config)
    saved = tensors(config)
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    return saved


def write_sharded(folder: Path, config: dict[str, Any] = CONFIG) -> dict[str, torch.Tensor]:
    """Write config.json and two shards with their index, and return the tensors."""
    write_config(folder, config)
    saved = tensors(config)
    names = sorted(saved)
    placed = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        shard = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: saved[name] for name in part}, folder / shard)
        placed |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return saved
