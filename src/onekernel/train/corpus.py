"""Texts as files of token ids in a run's folder: written once, memory-mapped, the same for every process and resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from onekernel.errors import TrainingError
from onekernel.text.vocab import Vocab
from onekernel.train.documents import documents
from onekernel.train.settings import DataSettings
from onekernel.train.vocabulary import batched, plain_text, token_id

TokenFile = npt.NDArray[np.uint32]

_TRAIN, _HELD_OUT, _ABOUT = "train.bin", "held_out.bin", "about.json"
_BATCH_CHARACTERS = 4_000_000


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids to train on and to measure on."""

    train: TokenFile
    held_out: TokenFile


def write_corpus(
    folder: Path, data: DataSettings, vocab: Vocab, say: Callable[[str], None] = lambda text: None
) -> None:
    """Tokenize the texts into `folder`.

    Raises ConfigError or TrainingError for a source that is missing or damaged, TrainingError if there is too little
    text or no room on the disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _ABOUT).unlink(missing_ok=True)
    try:
        tokens = _write_tokens(folder / _TRAIN, data.train, data, vocab)
        if data.held_out:
            held_out = _write_tokens(folder / _HELD_OUT, data.held_out, data, vocab)
        else:
            held_out = _split(folder, tokens, max(int(tokens * data.held_out_share), data.context + 1))
            tokens -= held_out
        for name, count in (("training", tokens), ("held-out", held_out)):
            if count <= data.context:
                raise TrainingError(
                    f"the {name} text has {max(count, 0)} tokens and one piece takes {data.context + 1}; "
                    "give more text, or a smaller data.context"
                )
        about = {"train_tokens": tokens, "held_out_tokens": held_out}
        (folder / _ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")  # last: now the files are whole
    except OSError as error:
        raise TrainingError(f"the token ids cannot be written to {folder}: {error.strerror or error}") from error
    say(f"{tokens:,} tokens to train on, {held_out:,} held out")


def open_corpus(folder: Path) -> Corpus:
    """Map what `write_corpus` wrote."""
    return Corpus(*(np.memmap(folder / name, np.uint32, mode="r") for name in (_TRAIN, _HELD_OUT)))


def has_corpus(folder: Path) -> bool:
    """Whether `write_corpus` finished there."""
    return (folder / _ABOUT).is_file()


def _write_tokens(path: Path, sources: Sequence[str], data: DataSettings, vocab: Vocab) -> int:
    """Write the ids of all documents, each followed by the end of sequence; return how many."""
    tokens = 0
    with path.open("wb") as file:
        for ids in _ids(documents(sources, data.column), vocab):
            file.write(ids.tobytes())
            tokens += len(ids)
    return tokens


def _ids(texts: Iterator[str], vocab: Vocab) -> Iterator[TokenFile]:
    backend, end = plain_text(vocab), token_id(vocab, "eos_token")
    ending = [] if end is None else [end]
    for batch in batched(texts, _BATCH_CHARACTERS):
        found = backend.encode_batch_fast(batch, add_special_tokens=False)
        yield np.concatenate([np.array([*one.ids, *ending], np.uint32) for one in found])


def _split(folder: Path, tokens: int, held_out: int) -> int:
    """Move the last `held_out` tokens to their own file, half of all at most; return how many."""
    held_out = min(held_out, tokens // 2)
    with (folder / _TRAIN).open("r+b") as file:
        file.seek(4 * (tokens - held_out))
        (folder / _HELD_OUT).write_bytes(file.read())
        file.truncate(4 * (tokens - held_out))
    return held_out
