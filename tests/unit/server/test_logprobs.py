"""Log probabilities of plain completions, whose tokens are told apart by their text alone."""

from __future__ import annotations

from onekernel.engine.request import TokenLogprob
from onekernel.server.logprobs import IMPOSSIBLE, chat_logprobs, completion_logprobs


def token(token_id: int, raw: bytes, logprob: float, *top: TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token_id, raw.decode("utf-8", "replace"), tuple(raw), logprob, top)


LIKELY = token(1, b"a", -0.1)
TWIN = token(2, b"a", -3.0)
HALF, OTHER_HALF = token(3, b"\xc3", -4.0), token(4, b"\xe2\x80", -5.0)


def top(entry: TokenLogprob) -> dict[str, float]:
    told = completion_logprobs([entry])
    assert told is not None
    [named] = told["top_logprobs"]
    assert told["tokens"][0] in named  # by which a client finds the chosen token
    return dict(named)


def test_of_tokens_with_one_text_the_likeliest_counts() -> None:
    assert top(token(1, b"a", -0.1, LIKELY, TWIN)) == {"a": -0.1}
    assert top(token(2, b"a", -3.0, LIKELY)) == {"a": -0.1}


def test_parts_of_characters_are_told_apart() -> None:
    told = top(token(3, b"\xc3", -4.0, LIKELY, HALF, OTHER_HALF))
    assert told == {"a": -0.1, r"bytes:\xc3": -4.0, r"bytes:\xe2\x80": -5.0}
    assert top(token(5, "\ufffd".encode(), -1.0)) == {"\ufffd": -1.0}


def test_the_chosen_token_is_added_to_the_likeliest() -> None:
    assert top(token(9, b"z", float("-inf"), LIKELY)) == {"a": -0.1, "z": IMPOSSIBLE}
    assert top(token(9, b"z", -7.0)) == {"z": -7.0}


def test_offsets_count_a_part_of_a_character_as_one() -> None:
    told = completion_logprobs([HALF, LIKELY], offset=2)
    assert told is not None
    assert (told["tokens"], told["text_offset"]) == ([r"bytes:\xc3", "a"], [2, 3])


def test_a_chats_tokens_have_their_bytes_beside_them() -> None:
    told = chat_logprobs([token(3, b"\xc3", -4.0, HALF)])
    assert told is not None
    assert told["content"][0]["top_logprobs"] == [{"token": "\ufffd", "bytes": [0xC3], "logprob": -4.0}]
