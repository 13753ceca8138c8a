from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onekernel.text.detokenize import Detokenizer
from onekernel.text.tokenizer import Tokenizer
from tests.unit.text.conftest import Load
from tests.unit.text.families import FAMILIES, TEXTS

# Surrogates are no characters; they have their own test.
ANY_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
HARD = st.lists(st.sampled_from([*TEXTS, "👩‍👩‍👧‍👦", "🇫🇷", "ก็", "한", "ﷺ", "\u202e", "▁", " ", "\n"]), max_size=6).map(
    "".join
)
BYTE_LEVEL = ["gpt2", "smollm", "llama3", "qwen"]
SENTENCEPIECE = ["llama2", "mistral", "yi"]


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@pytest.mark.complaint(
    "G1", file="text/detokenize.py", old="self._utf8.decode(piece)", new='piece.decode("utf-8", "replace")'
)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=50)
@given(text=ANY_TEXT | HARD)
@example(text="👩‍👩‍👧‍👦 你好 नमस्ते مرحبا")
def test_pieces_joined_are_the_text(load: Load, family: str, text: str) -> None:
    tokenizer = load(family)
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    # The library's own decoder agrees wherever the bytes are UTF-8, as those of any text are.
    assert "".join(pieces) == tokenizer._backend.decode(ids)
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)


@pytest.mark.complaint("G2", file="text/detokenize.py", old='("replace")', new='("strict")')
@pytest.mark.parametrize("family", BYTE_LEVEL)
@settings(max_examples=50)
@given(data=st.data())
def test_any_ids_decode_as_the_library_does(load: Load, family: str, data: st.DataObject) -> None:
    tokenizer = load(family)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_limit + 3), max_size=30))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == tokenizer._backend.decode(ids)


@pytest.mark.parametrize("family", SENTENCEPIECE)
@settings(max_examples=50)
@given(data=st.data())
def test_any_ids_decode_to_the_same_in_pieces(load: Load, family: str, data: st.DataObject) -> None:
    tokenizer = load(family)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_limit + 3), max_size=30))
    text = "".join(stream(tokenizer, ids))
    assert text == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert text == tokenizer._backend.decode(ids)


def test_a_bad_byte_does_not_take_back_a_character_that_was_shown(load: Load) -> None:
    tokenizer = load("llama2")
    byte = [tokenizer._backend.token_to_id(f"<0x{b:02X}>") for b in range(256)]
    ids = [byte[b] for b in "語".encode()] + [byte[0xFF]]
    assert stream(tokenizer, ids) == ["", "", "語", "\ufffd", ""]
    assert tokenizer._backend.decode(ids) == "\ufffd" * 4  # why the library's decoder cannot be streamed


@pytest.mark.complaint("G3", file="text/detokenize.py", old="final=True", new="final=False")
@pytest.mark.parametrize("family", ["smollm", "llama2"])
def test_bytes_held_at_the_end_are_shown(load: Load, family: str) -> None:
    tokenizer = load(family)
    ids = tokenizer.encode("ab 𝕏", add_special_tokens=False, parse_special=False)
    cut = ids[:-1]
    pieces = stream(tokenizer, cut)
    assert pieces[-1] == "\ufffd"
    assert "".join(pieces) == "ab \ufffd" == tokenizer.decode(cut)


@pytest.mark.complaint("G5", file="text/detokenize.py", old="self._started = True", new="self._started = False")
@pytest.mark.parametrize("family", SENTENCEPIECE)
def test_spaces_between_words_stay(load: Load, family: str) -> None:
    tokenizer = load(family)
    text = "The quick brown  fox"
    ids = tokenizer.encode(text, add_special_tokens=True, parse_special=False)
    assert "".join(stream(tokenizer, ids)) == text
    assert len(ids) > 3


@pytest.mark.parametrize("family", ["smollm", *SENTENCEPIECE])
def test_a_completion_keeps_the_space_after_its_prompt(load: Load, family: str) -> None:
    tokenizer = load(family)
    ids = tokenizer.encode("The quick brown", add_special_tokens=False, parse_special=False)
    prompt = tokenizer.encode("The quick", add_special_tokens=False, parse_special=False)
    answer = ids[len(prompt) :]
    detokenizer = Detokenizer(tokenizer, continues=True)
    assert "".join(map(detokenizer.push, answer)) + detokenizer.finish() == " brown"
    assert tokenizer.decode(answer, continues=True) == " brown"
    assert tokenizer.decode(answer) == (" brown" if family == "smollm" else "brown")


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_are_skipped(load: Load, family: str) -> None:
    tokenizer = load(family)
    end = tokenizer.special_tokens["eos_token"]
    ids = tokenizer.encode(f"one{end}two", add_special_tokens=True, parse_special=True)
    assert "".join(stream(tokenizer, ids)).replace(" ", "") == "onetwo"
    assert end in tokenizer.decode(ids, skip_special=False)


def test_the_cost_of_a_token_does_not_grow(load: Load) -> None:
    tokenizer = load("smollm")
    detokenizer = Detokenizer(tokenizer)
    half = tokenizer._backend.token_to_id(
        "ð"
    )  # 0xF0, which four-byte characters begin with: the worst case for windows

    def seconds(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            detokenizer.push(half)
        return time.perf_counter() - start

    seconds(1000)
    early = min(seconds(2000) for _ in range(5))
    seconds(100_000)
    late = min(seconds(2000) for _ in range(5))
    assert late < 10 * early  # a window that is decoded again would be 50 times slower
