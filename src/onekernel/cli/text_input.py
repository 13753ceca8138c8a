"""Text given as a file or through standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from onekernel.errors import ConfigError


def read_text(name: str) -> str:
    """Return the text of a file, or of standard input for "-", without one line break at its end.

    Raises ConfigError if it cannot be read or is not UTF-8.
    """
    source = "standard input" if name == "-" else name
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = content.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}; name a text file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not UTF-8 text: byte {error.start} is {content[error.start]:#04x}") from None
    return text.removesuffix("\n")
