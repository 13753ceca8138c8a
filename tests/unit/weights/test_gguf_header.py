"""GGUF files that are none, cut or damaged: always an error that names the file."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from onekernel.errors import ModelError, UnsupportedModelError
from onekernel.weights.gguf import GgufCheckpoint
from onekernel.weights.open import open_checkpoint
from tests.unit.weights.gguf_files import write_tiny


@pytest.mark.parametrize(
    ("head", "error", "words"),
    [
        (b"", ModelError, "cannot be read"),
        (b"GG", ModelError, "is not a GGUF file"),
        (b"PK\x03\x04zip", ModelError, r"is not a GGUF file: it begins with b'PK"),
        (b"GGUF\x01\0\0\0" + bytes(20), UnsupportedModelError, "GGUF version 1; versions 2 and 3 are read"),
        (b"GGUF\x03\0", ModelError, "cut or damaged"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 16, ModelError, "cut or damaged"),
    ],
)
def test_no_gguf_file(tmp_path: Path, head: bytes, error: type[ModelError], words: str) -> None:
    (tmp_path / "x.gguf").write_bytes(head)
    with pytest.raises(error, match=words):
        open_checkpoint(str(tmp_path / "x.gguf"))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, tokenizer__ggml__tokens=["a", "bc", ""], kind=Type.Q8_0)
    data = path.read_bytes()
    checkpoint = GgufCheckpoint(path)
    tables = len(data) - sum(info.stored_bytes for info in checkpoint.tensors.values())
    cut = tmp_path / "cut.gguf"
    for size in [*range(1, tables, 61), *range(tables, len(data) - 256, 4999), len(data) - 256]:
        cut.write_bytes(data[:size])
        with pytest.raises(ModelError, match=r"cut.gguf (is cut or damaged|is not a GGUF)") as caught:
            GgufCheckpoint(cut)
        assert "fetch it again" in str(caught.value) or size < 4


def test_a_damaged_head_gives_a_model_error_or_opens(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, tokenizer__ggml__tokens=["a", "bc", ""], kind=Type.Q4_0)
    data = path.read_bytes()
    dice = random.Random(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(dice.randint(1, 3)):
            damaged[dice.randrange(4, 2400)] = dice.randrange(256)
        path.write_bytes(damaged)
        try:
            GgufCheckpoint(path).close()
        except ModelError:
            refused += 1
    assert refused > 100


def test_a_table_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    data = write_tiny(tmp_path).read_bytes()
    row = data.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight")
    for position, value, words in (
        (row, struct.pack("<I", 9), "'blk.0.attn_q.weight' has 9 dimensions"),
        (row + 4, struct.pack("<Q", 0), r"of shape \(64, 0\) does not divide"),
        (row + 20, struct.pack("<I", 12), r"of shape \(64, 64\) does not divide into blocks of Q4_K"),
        (row + 24, struct.pack("<Q", 1 << 40), "ends at byte 10995"),
    ):
        damaged = tmp_path / "damaged.gguf"
        damaged.write_bytes(data[:position] + value + data[position + len(value) :])
        with pytest.raises(ModelError, match=words):
            GgufCheckpoint(damaged)
    twice = data.replace(b"blk.0.attn_v.weight", b"blk.0.attn_k.weight")
    (tmp_path / "twice.gguf").write_bytes(twice)
    with pytest.raises(ModelError, match=r"blk.0.attn_k.weight is there twice"):
        GgufCheckpoint(tmp_path / "twice.gguf")
