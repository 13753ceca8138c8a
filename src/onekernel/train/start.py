"""What a run begins with: a new model or an existing one, and the tokenizer that belongs to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from onekernel.config import ModelConfig
from onekernel.errors import ConfigError
from onekernel.models.registry import check_tensors, model_config
from onekernel.text import hf_vocab
from onekernel.text.vocab import Vocab
from onekernel.train.documents import documents
from onekernel.train.model import Activation, SparseLlama, initialise
from onekernel.train.settings import Settings, new_model
from onekernel.train.vocabulary import read_vocabulary, rows, train_vocabulary, write_vocabulary
from onekernel.weights.checkpoint import Checkpoint
from onekernel.weights.open import open_checkpoint


@dataclass(frozen=True, slots=True)
class Start:
    """The model's dimensions, its tokenizer, and the checkpoint its weights come from (None: new ones)."""

    config: ModelConfig
    vocab: Vocab
    checkpoint: Checkpoint | None
    activation: Activation
    """What the weights were trained with so far; a new model's is its own."""


def find_start(settings: Settings, tokenizer: Path, say: Callable[[str], None] = lambda text: None) -> Start:
    """Open what the settings name. A tokenizer is trained if none is given, once: it is kept in `tokenizer`.

    Raises ModelError or HubError for a model that cannot be opened, ConfigError for dimensions that contradict, and the
    errors of `documents` where a tokenizer is trained.
    """
    if settings.model.start is not None:
        checkpoint = open_checkpoint(settings.model.start, progress=say)
        config = model_config(checkpoint.settings.config)
        check_tensors(config, checkpoint)
        vocab = read_vocabulary(checkpoint.settings.tokenizer, settings.model.start)
        wanted = settings.model.hidden_act or config.hidden_act
        _check_renoise(settings, wanted)
        return Start(replace(config, hidden_act=wanted), vocab, checkpoint, config.hidden_act)
    _check_renoise(
        settings, new_model(settings, settings.tokenizer.vocab_size).hidden_act
    )  # before anything takes long
    vocab = _vocabulary(settings, tokenizer, say)
    config = new_model(settings, rows(vocab))
    return Start(config, vocab, None, config.hidden_act)


def build_model(start: Start, settings: Settings, device: torch.device) -> SparseLlama:
    """Return the model on the device, float32, with its first weights."""
    model = SparseLlama(start.config, settings.data.context, recompute=settings.run.recompute)
    if start.checkpoint is None:
        initialise(model, settings.run.seed)
        return model.to(device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(start.checkpoint.read(name))
    start.checkpoint.close()
    return model.to(device)


def _check_renoise(settings: Settings, activation: Activation) -> None:
    if settings.sparsity.renoise and activation == "silu":
        raise ConfigError(
            f"sparsity.renoise is {settings.sparsity.renoise:g} and model.hidden_act silu, whose neurons do not die; "
            "set the former to 0, or the latter to relu"
        )


def _vocabulary(settings: Settings, kept: Path, say: Callable[[str], None]) -> Vocab:
    if settings.tokenizer.directory is not None:
        return hf_vocab.read_directory(Path(settings.tokenizer.directory).expanduser())
    if not (kept / "tokenizer.json").is_file():
        say(f"training a tokenizer of {settings.tokenizer.vocab_size} tokens")
        texts = documents(settings.data.train, settings.data.column)
        vocab = train_vocabulary(texts, settings.tokenizer.vocab_size, settings.tokenizer.train_bytes)
        kept.mkdir(parents=True, exist_ok=True)
        write_vocabulary(vocab, kept, settings.data.context)
    return hf_vocab.read_directory(kept)
