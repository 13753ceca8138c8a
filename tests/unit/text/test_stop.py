from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from onekernel.errors import ConfigError
from onekernel.text.stop import StopMatcher

TEXT = st.text(alphabet="abc<>", max_size=30)
STOPS = st.lists(st.text(alphabet="abc<>", min_size=1, max_size=5), max_size=4)


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    """Return what was shown for each piece and at the end, and the stop string."""
    matcher = StopMatcher(stops)
    shown = [matcher.push(piece) for piece in pieces]
    return [*shown, matcher.flush()], matcher.hit


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(edges)]


def whole(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the earliest start, then the shortest."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    start, _, stop = min(found, default=(len(text), 0, None))
    return text[:start], stop


@pytest.mark.complaint(
    "H1", file="text/stop.py", old="return self._release(pending)", new="return self._release(len(self._held))"
)
@given(TEXT, STOPS, st.lists(st.integers(0, 99), max_size=12))
@example("abcab<", ["bca"], [1, 2, 3, 4])
def test_the_cuts_do_not_matter_and_nothing_of_a_stop_string_is_shown(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    shown, hit = run(pieces_of(text, cuts), stops)
    assert ("".join(shown), hit) == whole(text, stops)


@pytest.mark.complaint(
    "H2", file="text/stop.py", old="return start\n        return size", new="return 0\n        return size"
)
@given(TEXT, STOPS)
def test_only_a_tail_that_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for end, character in enumerate(text, start=1):
        shown += matcher.push(character)
        if matcher.hit is not None:
            return
        held = text[len(shown) : end]
        assert text[:end] == shown + held
        # What is held begins a stop string, or is a complete one behind such a beginning.
        assert not held or any(stop.startswith(held) for stop in stops)
        longer = [text[start:end] for start in range(len(shown))]
        assert not any(stop.startswith(tail) for stop in stops for tail in longer)


@pytest.mark.complaint("H3", file="text/stop.py", old="start <= pending", new="start <= len(self._held)")
def test_the_earliest_start_wins() -> None:
    assert run(["ab", "c", "x"], ["abcd", "bc"]) == (["", "", "a", ""], "bc")
    assert run(["ab", "c", "d"], ["abcd", "bc"]) == (["", "", "", ""], "abcd")
    assert run(["xST", "O", "P y"], ["STOP"]) == (["x", "", "", ""], "STOP")


@pytest.mark.complaint("H3", file="text/stop.py", old="len(stop), stop) for", new="-len(stop), stop) for")
def test_of_two_that_start_together_the_first_complete_wins() -> None:
    assert run(["x", "abc"], ["abc", "ab"]) == (["x", "", ""], "ab")
    assert run(["x", "a", "b", "c"], ["abc", "ab"]) == (["x", "", "", "", ""], "ab")


def test_a_complete_stop_string_at_the_end_of_the_text_counts() -> None:
    assert run(["xab", "c"], ["abcd", "bc"]) == (["x", "", "a"], "bc")
    assert run(["xab"], ["ab"]) == (["x", ""], "ab")


@pytest.mark.complaint("H4", file="text/stop.py", old="self._release(len(self._held)) if", new='"" if')
def test_held_text_is_shown_when_the_text_ends() -> None:
    assert run(["hello </", "ans"], ["</answer>"]) == (["hello ", "", "</ans"], None)
    assert run(["no stops"], []) == (["no stops", ""], None)


def test_nothing_follows_a_hit() -> None:
    matcher = StopMatcher(["."])
    assert [matcher.push("one. two"), matcher.push("three"), matcher.flush(), matcher.hit] == ["one", "", "", "."]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        StopMatcher(["a", ""])
