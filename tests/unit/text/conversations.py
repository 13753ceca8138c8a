"""Conversations that reach every branch of the template fixtures."""

from __future__ import annotations

from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather & <wind>",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The city's name"},
                "days": {"type": "array", "items": {"type": "integer"}},
                "units": {"type": ["string", "number"]},
                "extra": {"type": "object", "additionalProperties": {"type": "boolean"}},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "description": "Time", "parameters": {"type": "object", "properties": {}}},
}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content}


def calls(*arguments: Any) -> list[dict[str, Any]]:
    return [
        {"id": "abcdefgh1", "type": "function", "function": {"name": "get_weather", "arguments": value}}
        for value in arguments
    ]


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "user": {"messages": [user("What is the capital of France?")]},
    "no generation prompt": {"messages": [user("Hi"), assistant("Hello.")], "add_generation_prompt": False},
    "system": {"messages": [system("  Be brief. \n"), user("\n Hi there \t\n")]},
    "turns": {"messages": [system("Be brief."), user("1 + 1?"), assistant(" 2\n"), user("and 1234567 + 1?")]},
    "unicode": {"messages": [user("你好 👩‍👩‍👧‍👦 नमस्ते مرحبا é e\u0301 ▁ <b>&amp;</b> \u2028 'quoted' \"so\"")]},
    "code": {"messages": [user("def f(x):\n\treturn [x] * 3  # {{ not jinja }} {% nor this %}\r\n")]},
    "empty content": {"messages": [user(""), assistant(""), user("?")]},
    "roles out of order": {"messages": [user("a"), user("b")]},
    "starts with assistant": {"messages": [assistant("a"), user("b")]},
    "unknown role": {"messages": [user("a"), {"role": "critic", "content": "b"}]},
    "comment": {"messages": [user("a"), {"role": "comment", "content": "b"}, assistant("c")]},
    "tools": {"messages": [system("Help."), user("Weather in Paris?")], "tools": [WEATHER, CLOCK]},
    "tools without system": {"messages": [user("Weather?")], "tools": [WEATHER]},
    "tool call": {
        "messages": [
            user("Weather?"),
            assistant("", tool_calls=calls({"city": "Nîmes <3", "days": [1, 2], "now": True})),
            tool('{"temperature": 21.5}'),
            assistant("It is 21.5 degrees."),
            user("Thanks"),
        ],
        "tools": [WEATHER],
    },
    "two tool calls": {
        "messages": [
            user("Weather?"),
            assistant("Looking.", tool_calls=calls({"city": "A"}, {"city": "B"})),
            tool("1"),
            tool("2"),
        ],
    },
    "arguments as text": {"messages": [user("?"), assistant("", tool_calls=calls('{"city": "A"}')), tool("1")]},
    "thinking in history": {
        "messages": [
            user("2 + 2?"),
            assistant("<think>\n\nTwo and two.\n</think>\n\n4"),
            user("sure?"),
            assistant("<think>\nYes\n</think>\n\nYes."),
        ]
    },
    "reasoning field": {"messages": [user("a"), assistant("b", reasoning_content="\nbecause\n")]},
    "thinking off": {"messages": [user("2 + 2?")], "enable_thinking": False},
    "date": {"messages": [user("Today?")], "date_string": "26 Jul 2024"},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    "no content": {"messages": [{"role": "user"}]},
}
