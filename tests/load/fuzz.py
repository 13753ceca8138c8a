"""Request bodies that no client should send: valid ones with something replaced, added, nested or cut."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "look", "description": "look", "parameters": SCHEMA}}

CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Paris"}'}}

VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "warm"},
            {"role": "user", "content": "and?"},
        ],
        "max_tokens": 4,
        "max_completion_tokens": 4,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 1,
        "n": 1,
        "stop": ["x"],
        "stream": False,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "logit_bias": {"5": -1},
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "repetition_penalty": 1.1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        "tools": [TOOL],
        "tool_choice": "auto",
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "/v1/completions": {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 4, "echo": False, "logprobs": 1, "n": 1},
    "/tokenize": {"content": "hello", "add_special": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}

DEEP: Any = json.loads("[" * 300 + "]" * 300)

DEEPEST = 8
"""How far inside a body something is replaced."""

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, -(2**63), 2**64, 10**40, 0.0, -0.0, 1e-320, 1e308, 0.1),
    *("", "a", "\x00", "\ud800", "é" * 50, "<|im_end|>", "{{ 7 * 7 }}", "../../etc/passwd", "a" * 5000, "1", "auto"),
    *([], [[]], [None], [1.5], [-1], ["a"] * 40, {}, {"": {}}, {"type": "text"}, {"$ref": "#"}, {"type": ["object"]}),
    *({"anyOf": [{}] * 40}, {"pattern": "(a+)+$"}, {"enum": []}, {"minimum": "x"}, DEEP),
]


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return where something can be replaced: the keys that lead there."""
    if len(at) == DEEPEST:
        return [at]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, one in inner for place in _places(one, (*at, key)))]


def _changed(value: Any, at: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    if not at:
        return change(value)
    copy = value.copy()
    copy[at[0]] = _changed(copy[at[0]], at[1:], change)
    return copy


def fuzzed(draw: random.Random) -> tuple[str, bytes]:
    """Return a path and a body: mostly a valid one with up to four odd values, sometimes no JSON at all."""
    path = draw.choice([*VALID, "/v1/chat/completions", "/v1/chat/completions"])
    needed = {"messages", "prompt", "content", "tokens"}
    body: Any = {name: value for name, value in VALID[path].items() if name in needed or draw.random() < 0.3}
    for _ in range(draw.choice((0, 1, 1, 1, 2, 4))):
        if not body:
            break
        at = draw.choice(_places(body)[1:])
        odd = draw.choice(ODD)
        if draw.random() < 0.2 and isinstance(body, dict):
            body = {**body, draw.choice([*VALID[path], "top_logprobs", "suffix", "functions", "unknown"]): odd}
        else:
            body = _changed(body, at, lambda old, odd=odd: odd)  # type: ignore[misc]
    if draw.random() < 0.01:
        body = draw.choice(ODD)
    raw = json.dumps(body).encode("utf-8", "surrogatepass")
    kind = draw.random()
    if kind < 0.01:
        return path, draw.choice([b"[", b'{"a":', b"[1,"]) * draw.choice([10, 1000, 15_000])
    if kind < 0.05:
        return path, raw[: draw.randrange(len(raw) + 1)]
    if kind < 0.1:
        flipped = bytearray(raw or b"x")
        flipped[draw.randrange(len(flipped))] = draw.randrange(256)
        return path, bytes(flipped)
    return path, raw
