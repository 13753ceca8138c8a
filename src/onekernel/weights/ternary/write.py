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
from onekernel.weights.architectures import model_config
from onekernel.weights.checkpoint import Checkpoint
from onekernel.weights.directory import CONFIG, GENERATION_CONFIG, WEIGHTS
from onekernel.weights.layout import check_tensors
from onekernel.weights.ternary import hf_packed
from onekernel.weights.ternary.checkpoint import HEAD, SCALE, TernaryCheckpoint

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
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write a checkpoint as a directory of its own; `config.ternary` says what is, or becomes, ternary or int8.

    Master weights are quantised, packed ones packed anew; what stays dense stays as it is. Raises ModelError for a
    checkpoint that is no directory or is not whole, ConfigError if there is a model already or the head cannot become
    what is asked for.
    """
    source, ternary = checkpoint.settings.tokenizer.directory, config.ternary
    if source is None or ternary is None:
        raise ModelError(f"{checkpoint.settings.source} is no Hugging Face directory, and only those are converted")
    if (destination / WEIGHTS).exists():
        raise ConfigError(f"{destination} holds a {WEIGHTS}; give a directory that does not")
    was = model_config(checkpoint.settings.config).ternary or Ternary()
    if was.head != "dense" and ternary.head != was.head:
        raise ConfigError(f"the head is {was.head} already; one of another kind is made of a dense one alone")
    view = TernaryCheckpoint(checkpoint, config)
    check_tensors(config, view)
    saved: dict[str, torch.Tensor] = {}
    for done, name in enumerate(view.tensors, start=1):
        if view.is_ternary(name):
            matrix = view.ternary(name)
            saved |= {name: hf_packed.pack(matrix.codes), _scale(name): matrix.scales}
        elif name != HEAD or (ternary.head == "dense" and not config.tie_word_embeddings):
            saved[name] = view.read(name)
        progress(done, len(view.tensors))
    if ternary.head == "int8":
        saved[HEAD], saved[_scale(HEAD)] = view.int8_head()
    elif config.tie_word_embeddings:
        for name in (HEAD, _scale(HEAD)):
            saved.pop(name, None)  # the embedding again
    destination.mkdir(parents=True, exist_ok=True)
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)
    stated = _stated(checkpoint.settings.config, ternary)
    (destination / CONFIG).write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
    about = {"format": "pt", "onekernel.format": FORMAT, "onekernel.version": __version__}
    save_file(saved, destination / WEIGHTS, metadata=about | {"onekernel.source": checkpoint.settings.name})
    # safetensors writes for the owner alone; a service runs as another user.
    (destination / WEIGHTS).chmod((destination / CONFIG).stat().st_mode)


def _scale(name: str) -> str:
    return name.removesuffix(".weight") + SCALE


def _stated(config: Mapping[str, Any], ternary: Ternary) -> dict[str, Any]:
    """Return the config.json with the quantization_config of what is written."""
    stated: dict[str, Any] = {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "offline",
        "modules_to_not_convert": None if ternary.head == "ternary" else ["lm_head"],
    }
    if ternary.group is not None:
        stated["group_size"] = ternary.group
    if ternary.head != "dense":
        stated["head"] = ternary.head
    return {**config, "quantization_config": stated}
