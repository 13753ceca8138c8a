"""The tokenizer of a run: a model's own, one from a folder, or one trained on the text; and how it is written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from onekernel.errors import TrainingError
from onekernel.text import gguf_vocab, hf_vocab
from onekernel.text.vocab import Vocab
from onekernel.weights.checkpoint import TokenizerFiles

END = "<|endoftext|>"
"""Ends a document, and an answer of the model; id 0 of a trained tokenizer."""


def read_vocabulary(files: TokenizerFiles, source: str) -> Vocab:
    """Return a model's own tokenizer; raises ModelError if it is damaged, TrainingError if there is none."""
    if files.gguf_metadata is not None:
        return gguf_vocab.read_metadata(files.gguf_metadata)
    if files.directory is None:
        raise TrainingError(f"{source} has no tokenizer; give a model with its tokenizer.json")
    return hf_vocab.read_directory(files.directory)


def train_vocabulary(texts: Iterable[str], vocab_size: int, most_bytes: int) -> Vocab:
    """Train a byte-level BPE on the first `most_bytes` of the texts.

    Raises TrainingError if the text does not give `vocab_size` tokens.
    """
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]  # the library's own
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_first(texts, most_bytes), trainer)
    found = backend.get_vocab_size()
    if found == len(pre_tokenizers.ByteLevel.alphabet()) + 1:
        raise TrainingError("the training text is empty or too short to learn a single pair of bytes from; give more")
    if found < vocab_size:
        raise TrainingError(
            f"the text gives a vocabulary of {found} tokens and {vocab_size} were asked for; "
            f"set tokenizer.vocab_size to {found} or less, or give more text"
        )
    return Vocab(backend, {"bos_token": END, "eos_token": END}, frozenset({0}))


def _first(texts: Iterable[str], most_bytes: int) -> Iterator[str]:
    """Yield texts, the last one cut, up to so many bytes (of characters that take one)."""
    left = most_bytes
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def token_id(vocab: Vocab, name: str) -> int | None:
    """Return the id of a special token by its name, such as eos_token; None if the tokenizer names none."""
    text = vocab.special_tokens.get(name)
    return None if text is None else vocab.backend.token_to_id(text)


def rows(vocab: Vocab) -> int:
    """Return how many rows an embedding needs: the largest id plus one."""
    return 1 + max(vocab.backend.get_vocab(with_added_tokens=True).values(), default=-1)


def plain_text(vocab: Vocab) -> Backend:
    """Return a copy of the tokenizer to which special tokens inside a text are plain text, as in a user's message."""
    backend = Backend.from_str(vocab.backend.to_str())
    backend.encode_special_tokens = True
    return backend


def batched(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Yield texts in lists of at least so many characters, the last one shorter."""
    waiting: list[str] = []
    size = 0
    for text in texts:
        waiting.append(text)
        size += len(text)
        if size >= characters:
            yield waiting
            waiting, size = [], 0
    if waiting:
        yield waiting


def write_vocabulary(vocab: Vocab, directory: Path, context: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and the default chat template, as transformers and this package read
    them."""
    vocab.backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        **dict(vocab.special_tokens),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if (template := vocab.chat_templates.get("default")) is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
