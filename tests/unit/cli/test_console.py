"""Bars, dimming and control characters: only where a person reads, and as little as NO_COLOR allows."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from onekernel.cli.answer import AnswerPrinter
from onekernel.cli.console import DIM, PLAIN, Console, bar
from onekernel.engine.request import Delta


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal() -> tuple[Terminal, Terminal]:
    """Stand-ins for stdout and stderr that are terminals; `inside` puts them in place."""
    return Terminal(), Terminal()


@contextmanager
def inside(terminal: tuple[Terminal, Terminal], **environment: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NO_COLOR", raising=False)
        for name, value in {"TERM": "xterm", **environment}.items():
            patch.setenv(name, value)
        patch.setattr(sys, "stdout", terminal[0])
        patch.setattr(sys, "stderr", terminal[1])
        yield


def show(*deltas: Delta) -> None:
    printer = AnswerPrinter()
    for delta in deltas:
        printer.push(delta)
    printer.end()


THINKING = (Delta("Let me", thinking=True), Delta(" see", thinking=True), Delta("Par"), Delta("is"))


def test_thinking_is_dimmed(terminal: tuple[Terminal, Terminal]) -> None:
    with inside(terminal):
        show(*THINKING)
    assert terminal[0].getvalue() == f"{DIM}Let me{PLAIN}{DIM} see{PLAIN}\nParis\n"
    assert terminal[1].getvalue() == ""


def test_no_color_marks_thinking_with_words(terminal: tuple[Terminal, Terminal]) -> None:
    with inside(terminal, NO_COLOR="1"):
        show(*THINKING)
        Console().note("a note")
    assert terminal[0].getvalue() == "[thinking]\nLet me see\n[end of thinking]\nParis\n"
    assert terminal[1].getvalue() == "a note\n"


def test_thinking_alone_is_closed(terminal: tuple[Terminal, Terminal]) -> None:
    with inside(terminal, NO_COLOR="1"):
        show(*THINKING[:1])
    assert terminal[0].getvalue() == "[thinking]\nLet me\n[end of thinking]\n"


def test_a_dumb_terminal_gets_no_escapes(terminal: tuple[Terminal, Terminal]) -> None:
    with inside(terminal, TERM="dumb"):
        console = Console()
        console.progress("loading", 1, 2)
        console.note("a note")
    assert terminal[1].getvalue() == "a note\n"


def test_a_model_cannot_send_escape_sequences_to_a_terminal(terminal: tuple[Terminal, Terminal]) -> None:
    with inside(terminal):
        show(Delta("a\x1b[2Jb\x9b\t\n"))
    assert terminal[0].getvalue() == "a\N{REPLACEMENT CHARACTER}[2Jb\N{REPLACEMENT CHARACTER}\t\n"


def test_a_file_gets_the_very_text(capsys: pytest.CaptureFixture[str]) -> None:
    show(Delta("a\x1b[2J"))
    assert capsys.readouterr().out == "a\x1b[2J\n"


def test_an_empty_answer_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    show(Delta("", (2,)), Delta("", finish_reason="stop"))
    assert capsys.readouterr().out == ""


def test_a_bar_is_drawn_in_place_and_erased(terminal: tuple[Terminal, Terminal]) -> None:
    with inside(terminal):
        console = Console()
        console.progress("loading", 1, 4)
        console.progress("loading", 4, 4)
        console.clear_bar()
    assert terminal[1].getvalue() == f"\rloading [{'#' * 7}{'.' * 23}] 1/4\x1b[K\r\x1b[K"
    assert terminal[0].getvalue() == ""


def test_a_note_takes_the_bar_away_first(terminal: tuple[Terminal, Terminal]) -> None:
    with inside(terminal):
        console = Console()
        console.progress("loading", 1, 4)
        console.error("cut")
    assert terminal[1].getvalue().endswith("\r\x1b[Kerror: cut\n")


def test_no_bar_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    Console().progress("loading", 1, 4)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("columns", [10, 20, 30, 80, 300])
def test_a_bar_never_wraps(columns: int) -> None:
    assert len(bar("reading the prompt", 100, 2000, columns)) < columns
