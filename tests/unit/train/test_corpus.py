"""Token files, and the pieces that are cut from them."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onekernel.errors import TrainingError
from onekernel.text.vocab import Vocab
from onekernel.train import corpus
from onekernel.train.corpus import has_corpus, open_corpus, write_corpus
from onekernel.train.documents import documents
from onekernel.train.pieces import Pieces, held_out_batches
from onekernel.train.settings import DataSettings
from onekernel.train.vocabulary import END, train_vocabulary
from tests.unit.train.tiny import write_text


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Vocab:
    path = write_text(tmp_path_factory.mktemp("text") / "text.txt")
    return train_vocabulary(documents([str(path)], "text"), 280, 10_000)


def test_every_document_ends_and_the_last_of_all_are_held_out(tmp_path: Path, vocab: Vocab) -> None:
    texts = ["the whale", "the ship" * 40, f"a {END} inside"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    said: list[str] = []
    write_corpus(tmp_path / "tokens", DataSettings(train=[str(tmp_path)], context=4), vocab, said.append)
    assert has_corpus(tmp_path / "tokens")
    found = open_corpus(tmp_path / "tokens")
    ids = [*found.train.tolist(), *found.held_out.tolist()]
    assert ids.count(0) == 3, "what looks like the end in a text is plain text"
    assert said == [f"{len(found.train)} tokens to train on, {len(found.held_out)} held out"]
    assert len(found.held_out) == max(int(0.05 * len(ids)), 5)
    assert vocab.backend.decode(ids, skip_special_tokens=False) == "".join(text + END for text in texts)


def test_held_out_text_of_its_own(tmp_path: Path, vocab: Vocab) -> None:
    train, held_out = write_text(tmp_path / "a.txt"), write_text(tmp_path / "b.txt", 50, seed=1)
    data = DataSettings(train=[str(train)], held_out=[str(held_out)], context=8)
    write_corpus(tmp_path / "tokens", data, vocab)
    found = open_corpus(tmp_path / "tokens")
    assert vocab.backend.decode(found.held_out.tolist()) == held_out.read_text()
    assert vocab.backend.decode(found.train.tolist()) == train.read_text()


def test_too_little_text_says_how_much_there_is(tmp_path: Path, vocab: Vocab) -> None:
    (tmp_path / "text.txt").write_text("whale")
    with pytest.raises(TrainingError, match=r"the training text has [0-9]+ tokens and one piece takes 65"):
        write_corpus(tmp_path / "tokens", DataSettings(train=[str(tmp_path / "text.txt")], context=64), vocab)
    assert not has_corpus(tmp_path / "tokens")


def test_a_full_disk_leaves_nothing_that_looks_whole(
    tmp_path: Path, vocab: Vocab, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_text(tmp_path / "text.txt")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(corpus, "_write_tokens", full)
    with pytest.raises(TrainingError, match=r"cannot be written to .*tokens: No space left on device"):
        write_corpus(tmp_path / "tokens", DataSettings(train=[str(text)], context=8), vocab)
    assert not has_corpus(tmp_path / "tokens")


def test_a_vocabulary_that_the_text_does_not_give(vocab: Vocab) -> None:
    with pytest.raises(TrainingError, match=r"gives a vocabulary of \d+ tokens and 5000 were asked for"):
        train_vocabulary(["whale whale"], 5000, 1000)


def test_a_vocabulary_of_nothing(vocab: Vocab) -> None:
    with pytest.raises(TrainingError, match="the training text is empty"):
        train_vocabulary([""], 5000, 1000)


@given(tokens=st.integers(30, 200), context=st.integers(2, 9), world=st.sampled_from([1, 2, 4]), seed=st.integers(0, 9))
def test_an_epoch_sees_every_piece_once_whoever_takes_it(tokens: int, context: int, world: int, seed: int) -> None:
    ids = np.arange(tokens, dtype=np.uint32)
    ranks = [Pieces(ids, context, 4, seed) for _ in range(world)]
    rows: list[list[int]] = []
    for step in range(-(-ranks[0].per_epoch // 4)):
        parts = [pieces.batch(step, rank, world) for rank, pieces in enumerate(ranks)]
        assert [part.shape for part in parts] == [torch.Size([4 // world, context + 1])] * world
        rows += torch.stack(parts, 1).flatten(0, 1).tolist()
    seen = [tuple(row) for row in rows[: ranks[0].per_epoch]]
    assert sorted(seen) == [tuple(range(n * context, (n + 1) * context + 1)) for n in range((tokens - 1) // context)]


def test_the_order_depends_on_seed_and_step_alone() -> None:
    ids = np.arange(400, dtype=np.uint32)
    straight = Pieces(ids, 4, 8, 3)
    batches = [straight.batch(step) for step in range(30)]
    assert torch.equal(Pieces(ids, 4, 8, 3).batch(29), batches[29])
    assert not torch.equal(Pieces(ids, 4, 8, 4).batch(29), batches[29])
    assert not torch.equal(batches[0], batches[99 // 8 + 1]), "the second epoch has an order of its own"


@given(pieces=st.integers(1, 20), size=st.integers(1, 4), world=st.integers(1, 3), most=st.integers(1, 25))
def test_held_out_pieces_count_once_in_as_many_turns_everywhere(pieces: int, size: int, world: int, most: int) -> None:
    ids = np.arange(pieces * 4 + 1, dtype=np.uint32)
    turns = [list(held_out_batches(ids, 4, most, size, rank, world)) for rank in range(world)]
    assert len({len(taken) for taken in turns}) == 1
    counted = [row[0] for taken in turns for rows, count in taken for row in rows.tolist()[:count]]
    assert sorted(counted) == [4 * n for n in range(min(pieces, most))]
