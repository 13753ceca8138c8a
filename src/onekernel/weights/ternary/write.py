"""Write a ternary model as packed safetensors: Hugging Face's layout, with what it cannot state in quantization_config.

Codes are packed and scales multiply as in transformers' "autobitlinear", so that transformers reads a model with one
scale a projection and a dense head too. Scales are float32; with groups they are (N, K / group). An int8 head is
lm_head.weight in int8 with lm_head.weight_scale, float32 (vocab_size,), beside the embedding.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from onekernel import __version__
from onekernel.config import ModelConfig, Ternary
from onekernel.errors import ConfigError, ModelError
from onekernel.weights.checkpoint import Checkpoint
from onekernel.weights.directory import CONFIG, GENERATION_CONFIG, WEIGHTS
from onekernel.weights.layout import check_tensors
from onekernel.weights.ternary import hf_packed
from onekernel.weights.ternary.checkpoint import EMBEDDING, HEAD, SCALE, TernaryCheckpoint
from onekernel.weights.ternary.int8_rows import quantise_rows

FORMAT = "ternary-1"

_COPIED = (
    GENERATION_CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""What belongs to a model beside its weights; copied if it is there."""


def write_ternary(
    checkpoint: Checkpoint,
    config: ModelConfig,
    destination: Path,
    *,
    int8_head: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write a checkpoint as a directory of its own; `config.ternary` says how its projections are, or become, ternary.

    Master weights are quantised, packed ones packed anew; nothing else changes, but that a new head is int8. Raises
    ModelError for a checkpoint that is no directory or is not whole, ConfigError if there is a model already.
    """
    source, ternary = checkpoint.settings.tokenizer.directory, config.ternary
    if source is None or ternary is None:
        raise ModelError(f"{checkpoint.settings.source} is no Hugging Face directory, and only those are converted")
    if (destination / WEIGHTS).exists():
        raise ConfigError(f"{destination} holds a {WEIGHTS}; give a directory that does not")
    if int8_head and ternary.head != "dense":
        raise ConfigError(f"the head is {ternary.head} already; an int8 one is made of a dense one")
    view = TernaryCheckpoint(checkpoint, config)
    check_tensors(config, view)
    saved: dict[str, torch.Tensor] = {}
    for done, name in enumerate(view.tensors, start=1):
        saved |= _tensor(view, name, ternary, config.tie_word_embeddings)
        progress(done, len(view.tensors))
    if int8_head:
        dense = saved[EMBEDDING] if config.tie_word_embeddings else saved[HEAD]
        saved[HEAD], saved[_scale(HEAD)] = quantise_rows(dense)
    destination.mkdir(parents=True, exist_ok=True)
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)
    stated = _stated(checkpoint.settings.config, ternary, int8_head)
    (destination / CONFIG).write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
    about = {"format": "pt", "onekernel.format": FORMAT, "onekernel.version": __version__}
    save_file(saved, destination / WEIGHTS, metadata=about | {"onekernel.source": checkpoint.settings.name})


def _tensor(view: TernaryCheckpoint, name: str, ternary: Ternary, tied: bool) -> dict[str, torch.Tensor]:
    """Return what is stored for one tensor."""
    if name == HEAD and (tied and ternary.head != "int8"):
        return {}  # the embedding again
    if name == HEAD and ternary.head == "int8":
        values, scales = view.int8_head()
        return {name: values, _scale(name): scales}
    if not view.is_ternary(name):
        return {name: view.read(name)}
    matrix = view.ternary(name)
    return {name: hf_packed.pack(matrix.codes), _scale(name): matrix.scales}


def _scale(name: str) -> str:
    return name.removesuffix(".weight") + SCALE


def _stated(config: Mapping[str, Any], ternary: Ternary, int8_head: bool) -> dict[str, Any]:
    """Return the config.json with the quantization_config of what is written."""
    head = "int8" if int8_head else ternary.head
    stated: dict[str, Any] = {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "offline",
        "modules_to_not_convert": None if head == "ternary" else ["lm_head"],
    }
    if ternary.group is not None:
        stated["group_size"] = ternary.group
    if head != "dense":
        stated["head"] = head
    return {**config, "quantization_config": stated}
