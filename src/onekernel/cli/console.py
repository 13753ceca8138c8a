"""What the commands print, and where: data on stdout; notes, bars and errors on stderr."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from onekernel.engine.load import Listener

DIM, PLAIN, ERASE_LINE = "\x1b[2m", "\x1b[0m", "\x1b[K"

# A model may write escape sequences; on a terminal they could move the cursor or change its settings.
_CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def is_terminal(stream: TextIO) -> bool:
    """Return whether a person reads this stream on something that understands escape sequences."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colour(stream: TextIO) -> bool:
    """Return whether text on this stream may be dimmed: a terminal, and NO_COLOR is not set (no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def printable(text: str) -> str:
    """Return the text with control characters other than newline and tab replaced."""
    return text.translate(_CONTROL)


class Console:
    """Stdout and stderr of one command. The streams are looked up at each use, because tests replace them."""

    def __init__(self, *, verbose: bool = False) -> None:
        self.verbose = verbose
        self._bar = False
        self._lock = threading.Lock()  # the prefill bar is drawn by the engine's thread

    def note(self, text: str) -> None:
        """Print a sentence for the user on stderr."""
        self._line(text, dim=True)

    def detail(self, text: str) -> None:
        """Print a sentence on stderr, only with -v."""
        if self.verbose:
            self._line(text, dim=True)

    def error(self, text: str) -> None:
        """Print what went wrong on stderr."""
        self._line(f"error: {text}", dim=False)

    def data(self, text: str) -> None:
        """Print a line of results on stdout."""
        print(text, flush=True)

    def progress(self, what: str, done: int, total: int) -> None:
        """Draw a bar on stderr, in place, if that is a terminal; it is erased at the end."""
        if not is_terminal(sys.stderr):
            return
        if done >= total:
            self.clear_bar()
            return
        with self._lock:
            self._bar = True
            sys.stderr.write(f"\r{bar(what, done, total, _columns(sys.stderr))}{ERASE_LINE}")
            sys.stderr.flush()

    def clear_bar(self) -> None:
        """Erase the bar, if there is one."""
        with self._lock:
            if self._bar:
                self._bar = False
                sys.stderr.write(f"\r{ERASE_LINE}")
                sys.stderr.flush()

    def listener(self) -> Listener:
        """Return the console as the engine takes it."""
        from onekernel.engine.load import Listener

        return Listener(note=self.note, detail=self.detail, progress=self.progress)

    def _line(self, text: str, dim: bool) -> None:
        self.clear_bar()
        if dim and has_colour(sys.stderr):
            text = f"{DIM}{text}{PLAIN}"
        print(text, file=sys.stderr, flush=True)


def bar(what: str, done: int, total: int, columns: int) -> str:
    """Return `what`, a bar and the share done, in at most `columns` - 1 characters, so that it never wraps."""
    head, tail = f"{what} ", f" {done}/{total}"
    width = min(30, columns - 3 - len(head) - len(tail))
    if width < 4:
        return f"{head}{tail.strip()}"[: columns - 1]
    filled = width * done // total
    return f"{head}[{'#' * filled}{'.' * (width - filled)}]{tail}"


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
