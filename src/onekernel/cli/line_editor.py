"""Where chat lines come from: prompt-toolkit on a terminal, else plain input, else a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from onekernel.cli.console import Console
from onekernel.errors import ConfigError

PROMPT = "> "

ReadLine = Callable[[], str]
"""Returns what the user entered; raises EOFError at the end (Ctrl-D) and KeyboardInterrupt on Ctrl-C."""


def open_line_editor(console: Console) -> ReadLine:
    """Return how to read the user's lines; a paste of many lines is one entry if prompt-toolkit is installed."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _read_piped
    try:
        import prompt_toolkit
    except ImportError:
        console.note("each line of a paste is sent by itself; `pip install prompt-toolkit` brings a line editor")
        with contextlib.suppress(ImportError):  # history and arrow keys for input(), where Python has them
            import readline  # noqa: F401
        return lambda: input(PROMPT)
    session = prompt_toolkit.PromptSession(PROMPT, key_bindings=_key_bindings())
    return session.prompt  # type: ignore[no-any-return]


def _key_bindings() -> Any:
    from prompt_toolkit.key_binding import KeyBindings

    def new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    def leave_or_clear(event: Any) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    bindings = KeyBindings()
    bindings.add("escape", "enter")(new_line)
    bindings.add("c-c")(leave_or_clear)
    return bindings


def _read_piped() -> str:
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"standard input is not {error.encoding.upper()} text: byte {error.object[error.start]:#04x}"
        ) from None
    if not line:
        raise EOFError
    return line.removesuffix("\n")
