"""A trained model as a Hugging Face directory, which this package and transformers load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onekernel import __version__
from onekernel.config import ModelConfig
from onekernel.errors import TrainingError
from onekernel.text.vocab import Vocab
from onekernel.train.checkpoint import whole, write_tensors
from onekernel.train.vocabulary import token_id, write_vocabulary
from onekernel.weights.directory import CONFIG, GENERATION_CONFIG, WEIGHTS

_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_PUBLISHED = {"SparseLlamaForCausalLM": "LlamaForCausalLM", "SparseQwen2ForCausalLM": "Qwen2ForCausalLM"}
"""Published sparse architectures -> the same with a stated hidden_act."""


def export(directory: Path, model: nn.Module, config: ModelConfig, vocab: Vocab, *, write: bool) -> None:
    """Write weights in bf16, config.json and the tokenizer. Every process calls it, one writes.

    Raises TrainingError if the disk is full; weights come last, so a directory without them is not whole.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        full = whole(parameter)
        if write:
            tensors[name] = full.to(torch.bfloat16).contiguous()
    if not write:
        return
    begin = token_id(vocab, "bos_token")
    ends = sorted(vocab.eos_token_ids)
    ids: dict[str, Any] = {} if begin is None else {"bos_token_id": begin}
    ids |= {"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_vocabulary(vocab, directory, config.max_position_embeddings)
        _write_json(directory / CONFIG, config_json(config) | ids)
        _write_json(directory / GENERATION_CONFIG, ids)
    except OSError as error:
        raise TrainingError(
            f"the model cannot be written to {directory} ({error.strerror or error}): make room, then resume"
        ) from error
    about = {"format": "pt", "onekernel.version": __version__}
    write_tensors(directory / WEIGHTS, tensors, about, "model")
    # safetensors writes for the owner alone; a service runs as another user.
    (directory / WEIGHTS).chmod((directory / CONFIG).stat().st_mode)


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model, in transformers' words."""
    architecture = _PUBLISHED.get(config.architecture, config.architecture)
    scaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_type": scaling.kind, "rope_theta": config.rope_theta}
    if scaling.kind != "default":
        rope["factor"] = scaling.factor
    if scaling.kind == "llama3":
        rope |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    stated = {
        "architectures": [architecture],
        "model_type": _MODEL_TYPES[architecture],
        **{name: getattr(config, name) for name in _PLAIN},
        "attention_bias": config.o_bias,
        "rope_theta": config.rope_theta,  # transformers 4 and others read it here
        "rope_parameters": rope,
        "torch_dtype": "bfloat16",
    }
    if config.sliding_window is not None:
        stated["sliding_window"] = config.sliding_window
    return stated


_PLAIN = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "tie_word_embeddings",
)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
