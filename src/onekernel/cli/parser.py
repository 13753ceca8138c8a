"""The parser of one command: its help keeps its paragraphs, and a flag that it does not know gets the nearest one."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any


class Help(argparse.HelpFormatter):
    """Keeps the paragraphs of a description, and long command names on one line with their help."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(fill(paragraph, width, indent) for paragraph in text.split("\n\n"))


class CommandParser(argparse.ArgumentParser):
    """Refuses what it does not know itself, with its own usage; argparse leaves that to the parser of all commands."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the parsed arguments and an empty list; anything else is a usage error."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(self._refusal(rest[0]))
        return found, rest

    def _refusal(self, argument: str) -> str:
        flag = argument.partition("=")[0]
        if not flag.startswith("-"):
            return f"unexpected argument {argument!r}"
        near = nearest(flag, self._option_string_actions)
        advice = f"did you mean {' or '.join(near)}?" if near else f"`{self.prog} --help` lists them"
        return f"there is no flag {flag}; {advice}"


def nearest(flag: str, known: Iterable[str]) -> Sequence[str]:
    """Return up to two known flags that somebody may have meant: those that begin so, else those spelled alike."""
    from difflib import get_close_matches

    longer = [one for one in known if flag.startswith("--") and len(flag) > 3 and one.startswith(flag)]
    return longer[:2] or get_close_matches(flag.replace("_", "-"), known, n=1)
