"""Show a running answer on the terminal, the thinking part apart from the rest."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from onekernel.cli.console import DIM, PLAIN, has_colour, is_terminal, printable

if TYPE_CHECKING:
    from onekernel.engine.request import Delta


class AnswerPrinter:
    """Writes deltas as they come. Call `end` in any case.

    Thinking is dimmed on a terminal (in brackets under NO_COLOR); if stdout is a file or a pipe, thinking goes to
    stderr, so that stdout holds the answer alone.
    """

    def __init__(self) -> None:
        self._last = "\n"
        self._thinking = False

    def push(self, delta: Delta) -> None:
        """Write one delta."""
        if not delta.text:
            return
        if delta.thinking != self._thinking:
            self._turn(delta.thinking)
        self._write(delta.text)

    def end(self) -> None:
        """Close the last line."""
        if self._thinking:
            self._turn(False)
        if self._last != "\n":
            self._write("\n")

    def _turn(self, thinking: bool) -> None:
        if self._last != "\n":
            self._write("\n")
        marked = is_terminal(sys.stdout) and not has_colour(sys.stdout)
        if marked and thinking:
            self._write("[thinking]\n")
        self._thinking = thinking
        if marked and not thinking:
            self._write("[end of thinking]\n")
        self._last = "\n"

    def _write(self, text: str) -> None:
        stream = sys.stderr if self._thinking and not is_terminal(sys.stdout) else sys.stdout
        self._last = text[-1]
        if is_terminal(stream):
            text = printable(text)
        if self._thinking and text.strip() and has_colour(stream):
            text = f"{DIM}{text}{PLAIN}"
        stream.write(text)
        stream.flush()
