"""Tool calls told from text, however the text is cut; and the three families' forms through the server."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from onekernel.server.tool_calls import ToolCall, ToolCallReader
from tests.unit.server.conftest import Start
from tests.unit.server.test_chat import events, strictly

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
PARIS = ToolCall("weather", '{"city":"Paris"}')
NO_CALLS = [
    '{"name": "weather", "arguments": {"city": "\\ud800"}}',
    '{"name": "weather", "arguments": "\\ud800"}',
    '{"name": "weather", "arguments": {"days": NaN}}',
    '{"name": "weather", "arguments": {"days": -Infinity}}',
]
"""What Python reads as calls, but JSON or UTF-8 has no way to write."""


def read(pieces: list[str], most: int | None = None) -> tuple[str, list[ToolCall]]:
    reader = ToolCallReader(["weather", "time"], most)
    read = [*(reader.push(piece) for piece in pieces), reader.flush()]
    return "".join(text for text, _ in read), [call for _, calls in read for call in calls]


CASES = [
    ("Just text.", "Just text.", []),
    (f"<tool_call>\n{CALL}\n</tool_call>", "", [PARIS]),
    (f"Let me see.\n<tool_call>{CALL}</tool_call>", "Let me see.\n", [PARIS]),
    (f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", "", [PARIS, PARIS]),
    (f"<tool_call>\n{CALL}", "", [PARIS]),
    (CALL, "", [PARIS]),
    (f"  \n{CALL}\n", "", [PARIS]),
    ('{"name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    ('<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    (f"{CALL}; {CALL}", "", [PARIS, PARIS]),
    (f"[{CALL}, {CALL}]", "", [PARIS, PARIS]),
    ('{"name": "time"}', "", [ToolCall("time", "{}")]),
    ('{"name": "weather", "arguments": "{\\"city\\": 1}"}', "", [ToolCall("weather", '{"city": 1}')]),
    ('{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}', []),
    ('<tool_call>{"name": "unknown"}</tool_call>!', '<tool_call>{"name": "unknown"}</tool_call>!', []),
    ("<tool_call>broken</tool_call> then", "<tool_call>broken</tool_call> then", []),
    ('<tool_call>{"name": "weather", "argu', '<tool_call>{"name": "weather", "argu', []),
    ('{"name": ["weather"]}', '{"name": ["weather"]}', []),
    ('{"answer": 42}', '{"answer": 42}', []),
    *((answer, answer, []) for answer in NO_CALLS),
    ("[1, 2]", "[1, 2]", []),
    ("a < b <tool", "a < b <tool", []),
    ("<", "<", []),
    ("[", "[", []),
    ("", "", []),
]


@pytest.mark.parametrize(("answer", "text", "calls"), CASES)
def test_calls_are_found_whole_and_letter_by_letter(answer: str, text: str, calls: list[ToolCall]) -> None:
    assert read([answer]) == (text, calls)
    assert read(list(answer)) == (text, calls)


def test_only_as_many_calls_as_are_wanted() -> None:
    assert read([f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"], most=1) == ("", [PARIS])


CUT = [
    ('<tool_call>\n{"name": "weather", "arguments": {"city": "Par', "", [ToolCall("weather", '{"city": "Par')]),
    ('{"name": "weather", "parameters": {"city": "Paris"', "", [ToolCall("weather", '{"city": "Paris"')]),
    ('{"name": "weather", "parameters": {"city": "Paris"}', "", [ToolCall("weather", '{"city": "Paris"}')]),
    ('{"name": "weather", "arguments": ', "", [ToolCall("weather", "")]),
    (f'[{CALL}, {{"name": "time", "arguments": {{', "", [PARIS, ToolCall("time", "{")]),
    (f'<tool_call>{CALL}</tool_call><tool_call>{{"name": "time", "arguments": {{', "", [PARIS, ToolCall("time", "{")]),
    (f'{CALL}; {{"na', "", [PARIS]),
    ('{"name": "weather", "argu', '{"name": "weather", "argu', []),
    ('{"name": "unknown", "arguments": {"city', '{"name": "unknown", "arguments": {"city', []),
    ('{"name": "weather\\', '{"name": "weather\\', []),
    ('{"answer": 42, "name', '{"answer": 42, "name', []),
    (f"{CALL} and then", f"{CALL} and then", []),
    ("Just te", "Just te", []),
    ("<tool_c", "<tool_c", []),
]
"""Answers that ended at their limit: only here a call may be incomplete."""


@pytest.mark.parametrize(("answer", "text", "calls"), CUT)
def test_a_call_that_was_cut_off_has_what_there_is_of_its_arguments(
    answer: str, text: str, calls: list[ToolCall]
) -> None:
    for demanded in (False, True):
        reader = ToolCallReader(["weather", "time"], demanded=demanded)
        made = [*(reader.push(letter) for letter in answer), reader.flush(cut=True)]
        assert [call for _, found in made for call in found] == calls
        if answer[0] in "{[<":
            assert "".join(piece for piece, _ in made) == ("" if demanded else text)


@given(st.sampled_from([case[0] for case in CASES]), st.lists(st.integers(0, 60), max_size=6))
def test_where_an_answer_is_cut_does_not_matter(answer: str, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    assert read([answer[a:b] for a, b in pairwise(places)]) == read([answer])


FORMS = [
    ("qwen", "qwen_tools", f"<tool_call>\n{CALL}\n</tool_call>"),
    ("qwen", "hermes", f"<tool_call>\n{CALL}\n</tool_call>"),
    ("llama3", "llama3", '{"name": "weather", "parameters": {"city": "Paris"}}'),
    ("llama3", "llama3", '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}'),
    ("mistral", "mistral", f"[TOOL_CALLS] [{CALL}]"),
    ("smollm", "smollm2", f"<tool_call>\n{CALL}\n</tool_call>"),
]


@pytest.mark.parametrize(("family", "template", "answer"), FORMS)
def test_each_familys_calls_come_in_openais_form(scripted: Start, family: str, template: str, answer: str) -> None:
    server = scripted(answer, family=family, template=template)
    told = server.chat(tools=[WEATHER, TIME]).json()
    choice = strictly(ChatCompletion, told).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    chunks = [strictly(ChatCompletionChunk, one) for one in events(server.chat(tools=[WEATHER], stream=True))]
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"
    [delta] = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert (delta.index, delta.type, delta.function.name) == (0, "function", "weather")
    assert json.loads(delta.function.arguments) == {"city": "Paris"}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""


@pytest.mark.parametrize(("family", "template"), [(family, template) for family, template, _ in FORMS[:5]])
def test_the_models_own_template_gets_the_tools(scripted: Start, family: str, template: str) -> None:
    server = scripted("Yes", family=family, template=template)
    assert server.chat(tools=[WEATHER]).status_code == 200
    assert server.chat(tools=[WEATHER], tool_choice="none").status_code == 200
    assert server.backend.tokenizer is not None
    with_tools, without = (server.backend.tokenizer.decode(ids) for ids in server.backend.prompts)
    assert "The weather in a city." in with_tools
    assert "The weather in a city." not in without


def test_a_template_without_a_place_for_tools_gets_a_system_message(scripted: Start) -> None:
    server = scripted("Yes", family="smollm", template="smollm2")
    server.chat(tools=[WEATHER])
    server.chat(
        tools=[WEATHER], messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    )
    assert server.backend.tokenizer is not None
    for ids, own in zip(server.backend.prompts, ("", "Be brief.\n\nYou can call"), strict=True):
        prompt = server.backend.tokenizer.decode(ids)
        assert "The weather in a city." in prompt and "<tool_call>" in prompt and own in prompt


def test_a_whole_conversation_with_a_tool_is_rendered(scripted: Start) -> None:
    server = scripted("It rains.", template="qwen_tools")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "user", "content": "The weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    assert server.chat(messages=messages, tools=[WEATHER]).status_code == 200
    assert server.backend.tokenizer is not None
    prompt = server.backend.tokenizer.decode(server.backend.prompts[0])
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>' in prompt
    assert "<tool_response>\nrain\n</tool_response>" in prompt


@pytest.mark.parametrize("answer", NO_CALLS)
def test_a_call_that_no_answer_can_hold_is_text(scripted: Start, answer: str) -> None:
    server = scripted(answer)
    message = server.chat(tools=[WEATHER]).json()["choices"][0]["message"]
    assert (message["content"], message.get("tool_calls")) == (answer, None)
    chunks = events(server.chat(tools=[WEATHER], stream=True))
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == answer


def test_an_answer_that_was_cut_stays_cut(scripted: Start) -> None:
    server = scripted(f"<tool_call>{CALL}</tool_call> and then")
    whole = server.chat(tools=[WEATHER]).json()["choices"][0]
    assert (whole["finish_reason"], whole["message"]["content"]) == ("tool_calls", "and then")
    tokens = len(
        server.backend.tokenizer.encode(f"<tool_call>{CALL}</tool_call>", add_special_tokens=False, parse_special=True)
    )  # type: ignore[union-attr]
    cut = server.chat(tools=[WEATHER], max_tokens=tokens).json()["choices"][0]
    assert (cut["finish_reason"], len(cut["message"]["tool_calls"])) == ("length", 1)


def test_text_is_only_a_call_where_tools_are_offered(scripted: Start) -> None:
    server = scripted(CALL)
    for body in ({}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": [TIME]}):
        message = server.chat(**body).json()["choices"][0]["message"]
        assert (message["content"], message.get("tool_calls")) == (CALL, None)
    assert server.chat(tools=[WEATHER], parallel_tool_calls=False).json()["choices"][0]["message"]["tool_calls"]


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([{"type": "retrieval"}], None, "tools[0]"),
        ([{"type": "function", "function": {"name": ""}}], None, "tools[0]"),
        ([{"type": "function", "function": {"name": "f", "description": 1}}], None, "tools[0]"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], None, "tools[0].function.parameters"),
        ([WEATHER], "sometimes", "tool_choice"),
        ([WEATHER], {"type": "function", "function": {"name": "other"}}, "tool_choice"),
        ([WEATHER], {"type": "function"}, "tool_choice"),
        ([], "required", "tool_choice"),
    ],
)
def test_tools_that_make_no_sense_are_named(scripted: Start, tools: Any, choice: Any, param: str) -> None:
    told = scripted().chat(tools=tools, tool_choice=choice)
    assert told.status_code == 400
    assert told.json()["error"]["param"] == param
