from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onekernel.text.thinking import KNOWN_TAGS, ThinkingSplitter, ThinkingTags, find_tags
from tests.unit.text.conftest import Load
from tests.unit.text.families import source

TAGS = ThinkingTags("<think>", "</think>")


def run(pieces: list[str], *, inside: bool = False) -> tuple[str, str]:
    """Return the joined thinking and the joined answer."""
    splitter = ThinkingSplitter(TAGS.open, TAGS.close, inside=inside)
    shown = [item for piece in pieces for item in splitter.push(piece)] + splitter.flush()
    assert all(text for text, _ in shown)
    return "".join(text for text, thinking in shown if thinking), "".join(
        text for text, thinking in shown if not thinking
    )


def test_thinking_then_answer() -> None:
    assert run(["<think>\nHm.\n</think>\n\nParis."]) == ("Hm.\n", "Paris.")
    assert run(["Hm.\n</think>", "\n", "\nParis.\n"], inside=True) == ("Hm.\n", "Paris.\n")
    assert run(["Paris."]) == ("", "Paris.")
    assert run(["Hm"], inside=True) == ("Hm", "")


def test_line_breaks_stay_elsewhere() -> None:
    assert run(["\n\nA\n\nB\n"]) == ("", "\n\nA\n\nB\n")


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think", ">", "a", " b\n"]), max_size=12),
    st.lists(st.integers(0, 99), max_size=12),
    st.booleans(),
)
def test_the_cuts_do_not_matter_and_no_tag_is_shown(parts: list[str], cuts: list[int], inside: bool) -> None:
    text = "".join(parts)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    thinking, answer = run(pieces, inside=inside)
    assert (thinking, answer) == run([text], inside=inside) == run(list(text), inside=inside)
    kept = text.replace("<think>", "").replace("</think>", "")
    assert len(thinking) + len(answer) <= len(kept)
    if inside and TAGS.close not in text:
        assert answer == ""


def test_text_that_only_looks_like_a_tag_is_not_held_for_long() -> None:
    splitter = ThinkingSplitter(TAGS.open, TAGS.close)
    assert splitter.push("a <thi") == [("a ", False)]
    assert splitter.push("s>") == [("<this>", False)]
    assert splitter.push("1 <") == [("1 ", False)]
    assert splitter.flush() == [("<", False)]


@pytest.mark.parametrize("tags", KNOWN_TAGS, ids=lambda tags: tags.open)
def test_tags_are_found_in_a_template(tags: ThinkingTags) -> None:
    assert find_tags(f"{{% if '{tags.close}' in content %}}") == tags


def test_templates_without_thinking() -> None:
    assert find_tags(source("qwen_tools")) is None
    assert find_tags(source("qwen_thinking")) == TAGS


@pytest.mark.parametrize("family", ["qwen", "qwen_special_think", "smollm", "yi"])
def test_the_prompt_says_where_the_answer_starts(load: Load, family: str) -> None:
    tokenizer = load(family, "qwen_thinking")
    answer = "because</think>\n\nso"

    def split(prompt: str) -> list[tuple[str, bool]]:
        ids = tokenizer.encode(prompt, add_special_tokens=False, parse_special=True)
        splitter = tokenizer.thinking_splitter(ids)
        assert splitter is not None
        return splitter.push(answer) + splitter.flush()

    assert split("<|im_start|>assistant\n<think>\n") == [("because", True), ("so", False)]
    assert split("<|im_start|>assistant\n") == [("because", False), ("so", False)]
    assert split("<|im_start|>assistant\n<think>\n\n</think>\n\n") == [("because", False), ("so", False)]


@pytest.mark.parametrize("family", ["qwen", "qwen_special_think"])
def test_tags_reach_the_splitter_even_as_special_tokens(load: Load, family: str) -> None:
    tokenizer = load(family, "qwen_thinking")
    ids = tokenizer.encode("<think>a</think>b<|im_end|>", add_special_tokens=False, parse_special=True)
    assert tokenizer.decode(ids) == "<think>a</think>b"


def test_a_model_without_thinking_has_no_splitter(load: Load) -> None:
    assert load("smollm", "smollm2").thinking_splitter([1, 2]) is None
    assert load("smollm").thinking_splitter([1, 2]) is None
