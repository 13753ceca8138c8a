"""Text given as a file or through standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from onekernel.errors import ConfigError

MAX_BYTES = 256 << 20
"""More than any context and any text that is scored; a pipe or a device may have no end."""


def read_text(name: str) -> str:
    """Return the text of a file, or of standard input for "-", without one line break at its end.

    Raises ConfigError if it cannot be read, has more than MAX_BYTES or is not UTF-8.
    """
    source = "standard input" if name == "-" else name
    try:
        if name == "-":
            content = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{source} holds more than {MAX_BYTES} bytes; give a shorter text")
        text = content.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}; name a text file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not UTF-8 text: byte {error.start} is {content[error.start]:#04x}") from None
    return text.removesuffix("\n")
