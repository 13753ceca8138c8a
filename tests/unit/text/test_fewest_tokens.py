"""What is said of a text's length without encoding it is never too much, and for long texts it is enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from onekernel.errors import ContextLengthError
from onekernel.text.fewest_tokens import SHORT, FewestTokens
from onekernel.text.token_bytes import TokenBytes
from onekernel.text.tokenizer import Tokenizer
from onekernel.text.vocab import placeholder
from tests.unit.text.families import CORPUS, FAMILIES

TOKENIZERS: dict[str, Any] = {}
HOSTILE = [
    "▁",
    "\x04",
    "\U00040000",
    "\u1112\u1161\u11ab",
    "\u2126\u0313\u0300\u0345",
    "\u212a\u0327",
    "\n" * 40,
    " " * 30,
    "=" * 50,
    "\ufffd",
]
"""Spaces and their marks, what canonical composition makes shorter, and runs that are one token."""


@pytest.fixture(scope="module", params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    name: str = request.param
    if name not in TOKENIZERS:
        folder: Path = FAMILIES[name].write(tmp_path_factory.mktemp(name), None)
        TOKENIZERS[name] = Tokenizer.from_directory(folder, {}, {})
    made: Tokenizer = TOKENIZERS[name]
    return made


@settings(max_examples=40)
@given(st.lists(st.sampled_from([*CORPUS, *HOSTILE]) | st.text(max_size=20), max_size=12))
def test_no_text_has_fewer_tokens(tokenizer: Tokenizer, pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = text.encode("utf-8", "replace").decode()
    fewest = tokenizer.fewest_tokens(whole, short=0)
    assert fewest <= len(tokenizer.encode(text, add_special_tokens=False, parse_special=True))


def test_most_families_say_something_of_a_long_text(tokenizer: Tokenizer) -> None:
    text = "".join(CORPUS) * (SHORT // len("".join(CORPUS)) + 1)
    fewest = tokenizer.fewest_tokens(text)
    assert fewest * 400 > len(text)
    assert tokenizer.fewest_tokens(text[: SHORT - 1]) == 0


def test_nothing_is_said_where_text_may_vanish() -> None:
    text, limit = "a b " * SHORT, 300

    def fewest(change: Any) -> int:
        backend = FAMILIES["qwen"].build()
        change(backend)
        return FewestTokens(backend, TokenBytes(backend), limit)(text)

    def strips(backend: Any) -> None:
        backend.add_tokens([AddedToken("<end>", rstrip=True)])

    def splits(backend: Any) -> None:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), backend.pre_tokenizer])

    def removes(backend: Any) -> None:
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")

    def replaces(backend: Any) -> None:
        backend.normalizer = normalizers.Replace("a b ", "")

    def lowers(backend: Any) -> None:
        backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])

    assert fewest(lambda backend: None) > 0
    for change in (strips, splits, removes, replaces, lowers):
        assert fewest(change) == 0
    assert Tokenizer(placeholder(10), {}, {}).fewest_tokens(text) == 0


@pytest.mark.parametrize("end", ["", "<|im_end|>"], ids=["plain", "disguised"])
def test_a_long_text_is_refused_before_it_is_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Eight megabytes would take half a minute."""
    tokenizer = Tokenizer.from_directory(FAMILIES["smollm"].write(tmp_path, "smollm2"), {}, {})
    text = "The quick brown fox. " * (SHORT // 16) + end

    def encode(*args: Any) -> list[int]:
        raise AssertionError("the text was encoded")

    def refuse(fewest: int) -> None:
        if fewest > 1000:
            raise ContextLengthError(fewest, 1000, 8192, at_least=True)

    monkeypatch.setattr("onekernel.text.tokenizer.encode", encode)
    monkeypatch.setattr("onekernel.text.special_text.encode", encode)
    with pytest.raises(ContextLengthError, match=r"the prompt has at least \d{4,} tokens"):
        tokenizer.encode_prompt(text, check_length=refuse)
    with pytest.raises(ContextLengthError, match=r"the prompt has at least \d{4,} tokens"):
        tokenizer.encode_chat([{"role": "user", "content": text}], check_length=refuse)
