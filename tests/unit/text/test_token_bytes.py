from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from onekernel.errors import ModelError
from onekernel.text.token_bytes import TokenBytes
from tests.unit.text.conftest import Load
from tests.unit.text.families import FAMILIES


@pytest.mark.complaint(
    "G4",
    file="text/token_bytes.py",
    old="bytes(_BYTE_OF[character] for character in token)",
    new='"".join(chr(_BYTE_OF[c]) for c in token).encode()',
)
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_of_parts_of_characters(load: Load, family: str) -> None:
    tokenizer = load(family)
    text = " 𝕏 語"
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    pieces = [tokenizer.token_bytes(i) for i in ids]
    assert b"".join(pieces).strip() == text.strip().encode()
    assert any(piece and piece.decode(errors="ignore") == "" for piece in pieces)
    assert "\ufffd" in {tokenizer.token_text(i) for i in ids}


@pytest.mark.complaint(
    "G4", file="text/token_bytes.py", old="self._byte_fallback and (byte", new="not self._byte_fallback and (byte"
)
def test_bytes_of_byte_tokens(load: Load) -> None:
    tokenizer = load("llama2")
    assert [tokenizer.token_bytes(3 + b) for b in range(256)] == [bytes([b]) for b in range(256)]


def test_text_of_tokens(load: Load) -> None:
    tokenizer = load("llama2")
    ids = tokenizer.encode("the fox", add_special_tokens=True, parse_special=False)
    assert tokenizer.token_text(ids[0]) == "<s>"
    assert "".join(map(tokenizer.token_text, ids[1:])) == " the fox"
    assert load("smollm").token_text(load("smollm").eos_token_ids.__iter__().__next__()) == "<|im_end|>"


def test_ids_without_a_token(load: Load) -> None:
    tokenizer = load("smollm")
    assert tokenizer.token_bytes(tokenizer.vocab_limit) == b""
    assert tokenizer.token_text(tokenizer.vocab_limit + 1000) == ""
    assert tokenizer.token_text(tokenizer.vocab_limit - 1) == "<|im_end|>"


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.CTC(), decoders.BPEDecoder()])
def test_other_decoders_are_refused_by_name(decoder: decoders.Decoder | None) -> None:
    backend = Backend(models.BPE())
    if decoder is not None:
        backend.decoder = decoder
    name = "null" if decoder is None else type(decoder).__name__
    with pytest.raises(ModelError, match=rf"decoder {name}; ByteLevel .* are supported"):
        TokenBytes(backend)
