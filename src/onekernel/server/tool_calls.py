"""Tool calls in an answer's text, told apart while it streams.

Two forms are read: JSON objects between <tool_call> tags (Qwen, Hermes), anywhere in the answer, and an answer that is
nothing but JSON objects (Llama 3, and models whose tags are special tokens, which text leaves out; Mistral puts them in
a list). An object is a call if it has the name of a tool that was offered; everything else stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"

_BEGUN = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(.*)', re.DOTALL)
"""A call that has come as far as its arguments: its name as JSON, and what there is of them."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool's name and its arguments as JSON text; of a call that was cut off, the beginning of that text."""

    name: str
    arguments: str


class ToolCallReader:
    """Takes an answer's text in pieces; returns text that can be shown and calls that are complete.

    names: the tools that were offered. most: calls that are taken; what follows them is left out. demanded: the answer
    is a call, so that none of it is text.
    """

    def __init__(self, names: Iterable[str], most: int | None = None, *, demanded: bool = False) -> None:
        self._names = frozenset(names)
        self._most = most
        self._demanded = demanded
        self._held = ""
        self._begun = False
        self._bare = False
        self._after_call = False
        self.found = 0
        """Calls so far."""

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Take a piece of text; return the text before, between and after calls that is certain, and the calls."""
        self._held += text
        if not self._begun and not self._begin():
            return "", []
        if self._bare:
            return "", []
        shown: list[str] = []
        calls: list[ToolCall] = []
        self._drop_break()
        while (start := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, start)
            if end < 0:
                break
            shown.append(self._held[:start])
            found = self._calls(self._held[start + len(OPEN) : end])
            end += len(CLOSE)
            if found is None:
                shown.append(self._held[start:end])
            else:
                calls += found
                self._after_call = True
            self._held = self._held[end:]
            self._drop_break()
        if start < 0:
            start = len(self._held) - _partial(self._held, OPEN)
        shown.append(self._held[:start])
        self._held = self._held[start:]
        return "".join(shown), self._take(calls)

    def flush(self, *, cut: bool = False) -> tuple[str, list[ToolCall]]:
        """End the text: return what was held back, as calls if it is complete ones, else as text.

        cut: the answer ended at its limit of tokens; then the last call may be one that has only begun, as in OpenAI's
        API, and what there is of a demanded call's name is left out.
        """
        rest, self._held = self._held, ""
        if self._bare or rest.startswith(OPEN):
            text = rest.strip().removeprefix(PYTHON_TAG).removeprefix(OPEN)
            found = self._calls(text) or (self._cut_calls(text) if cut else None)
            if found is not None:
                return "", self._take(found)
        return "" if cut and self._demanded else rest, []

    def _begin(self) -> bool:
        """Decide by the first characters whether the whole answer may be calls; return whether that is decided."""
        start = self._held.lstrip()
        if not start or start == "[" or (PYTHON_TAG.startswith(start) and start != PYTHON_TAG):
            return False
        self._begun = True
        self._bare = start.startswith(("{", "[{", PYTHON_TAG))
        return True

    def _drop_break(self) -> None:
        """Drop line breaks after a call, which are layout like the tags."""
        if self._after_call:
            self._held = self._held.lstrip("\r\n")
            self._after_call = not self._held

    def _take(self, calls: list[ToolCall]) -> list[ToolCall]:
        if self._most is not None:
            calls = calls[: max(self._most - self.found, 0)]
        self.found += len(calls)
        return calls

    def _calls(self, text: str) -> list[ToolCall] | None:
        """Return the calls that a text consists of; None if it does not consist of calls."""
        decoder = json.JSONDecoder()
        values: list[Any] = []
        text = text.strip()
        while text:
            try:
                value, end = decoder.raw_decode(text)
            except (ValueError, RecursionError):
                return None
            values += value if isinstance(value, list) else [value]
            text = text[end:].lstrip(" \r\n\t;,")
        calls = [self._call(value) for value in values]
        return [call for call in calls if call is not None] if calls and None not in calls else None

    def _cut_calls(self, text: str) -> list[ToolCall] | None:
        """Return the calls of a text that was cut off in the last one; None if it does not consist of calls."""
        decoder = json.JSONDecoder()
        calls: list[ToolCall] = []
        text = text.strip().removeprefix("[").lstrip()
        while text.startswith("{"):
            try:
                value, end = decoder.raw_decode(text)
            except (ValueError, RecursionError):
                begun = _BEGUN.match(text)
                if begun is None or (name := json.loads(begun[1])) not in self._names:
                    return calls or None
                return [*calls, ToolCall(name, begun[2].rstrip())]
            call = self._call(value)
            if call is None:
                return None
            calls.append(call)
            text = text[end:].lstrip(" \r\n\t;,")
        return None if text else calls or None

    def _call(self, value: Any) -> ToolCall | None:
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        try:
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            arguments.encode()
        except ValueError:  # NaN is no JSON, and half a surrogate pair is no text
            return None
        return ToolCall(name, arguments)


def _partial(text: str, tag: str) -> int:
    """Return the length of the longest tail that is a proper beginning of the tag."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0)
