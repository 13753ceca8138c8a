"""Structured output: what a random model writes under a constraint is what was asked for."""

from __future__ import annotations

import json
import threading
from typing import Annotated, Any

import httpx
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from onekernel import LLM
from onekernel.server import grammar
from onekernel.server.api_error import ApiError
from onekernel.server.grammar import AfterThinking, Grammars, check_schema, json_grammar, response_grammar
from onekernel.server.service import Service
from onekernel.server.settings import ServerSettings
from onekernel.server.tools import Tools
from onekernel.text.tokenizer import Tokenizer
from tests.unit.server.serving import until
from tests.unit.server.test_chat import events
from tests.unit.server.test_tool_calls import TIME, WEATHER
from tests.unit.text.families import FAMILIES

HI: list[Any] = [{"role": "user", "content": "Who?"}]
SETTINGS = ServerSettings()
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "job": {"enum": ["cook", "pilot"]},
    },
    "required": ["name", "age", "job"],
    "additionalProperties": False,
}


def person(schema: dict[str, Any] = PERSON) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_meets_its_schema(client: OpenAI, seed: int) -> None:
    told = client.chat.completions.create(
        model="tiny",
        messages=HI,
        response_format=person(),
        temperature=1,
        seed=seed,
        max_tokens=200,  # type: ignore[call-overload]
    )
    assert told.choices[0].finish_reason == "stop"
    value = json.loads(told.choices[0].message.content)
    assert set(value) == {"name", "age", "job"}
    assert len(value["name"]) <= 12 and 0 <= value["age"] <= 150 and value["job"] in ("cook", "pilot")


class Job(BaseModel):
    title: Annotated[str, Field(max_length=5)]
    years: Annotated[int, Field(ge=0, le=9)]


class Person(BaseModel):
    """With $defs and references; bounded, so that a random model comes to an end."""

    age: Annotated[int, Field(ge=0, le=99)]
    jobs: Annotated[list[Job], Field(max_length=2)]


def test_the_clients_parse_returns_an_object(client: OpenAI) -> None:
    told = client.chat.completions.parse(
        model="tiny", messages=HI, response_format=Person, temperature=1, seed=1, max_tokens=400
    )
    assert isinstance(told.choices[0].message.parsed, Person)


@pytest.mark.complaint(
    "L3",
    file="server/grammar.py",
    old='COMPACT = {"x-guidance": {"whitespace_flexible": False,',
    new='COMPACT = {"x-guidance": {"whitespace_flexible": True,',
)
def test_json_has_no_room_for_white_space_without_end(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    made = Grammars(tokenizer, 704)
    [constraint] = made.constraints(json_grammar({"type": "object"}), 1, "response_format")
    inside = False
    for text in '{"a":[1,{"b":null}],"c":"x"}':
        mask = constraint.mask()
        allowed = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_limit) if mask[i]}
        if not inside:  # inside of a string white space is text
            assert not any(piece.isspace() for piece in allowed), text
        [token] = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert mask[token], text
        constraint.accept(token)
        inside ^= text == '"'
    assert constraint.done


@pytest.mark.complaint(
    "L4", file="server/service.py", old="self._grammars = Grammars(", new="self._grammars: Any = None and Grammars("
)
def test_the_trie_is_built_when_the_model_is_ready_and_not_by_a_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    build = Grammars._build

    def noted(self: Grammars, tokenizer: Tokenizer) -> None:
        built.append(threading.current_thread().name)
        build(self, tokenizer)

    monkeypatch.setattr(Grammars, "_build", noted)
    service = Service(SETTINGS, llm.loaded.engine)
    until(lambda: service.grammars.ready)
    assert built == ["onekernel-grammar"]
    for _ in range(2):
        service.grammars.constraints(json_grammar(PERSON), 1, "response_format")
    assert len(built) == 1


@pytest.mark.complaint(
    "L5",
    file="server/chat_form.py",
    old='return "tool_calls" if called and completion.finish_reason == "stop" else completion.finish_reason',
    new='return "tool_calls" if called else "stop"',
)
def test_json_that_was_cut_says_length(client: OpenAI) -> None:
    for limit in (1, 5):
        told = client.chat.completions.create(
            model="tiny",
            messages=HI,
            response_format=person(),
            max_tokens=limit,
            seed=3,
            temperature=1,  # type: ignore[call-overload]
        )
        assert told.choices[0].finish_reason == "length"
        with pytest.raises(ValueError):
            json.loads(told.choices[0].message.content)


def test_json_object_is_an_object(client: OpenAI) -> None:
    told = client.chat.completions.create(
        model="tiny", messages=HI, response_format={"type": "json_object"}, max_tokens=60, temperature=1, seed=5
    )
    text = told.choices[0].message.content
    assert text is not None and text.startswith("{") and not text[1:2].isspace()
    if told.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_is_made(client: OpenAI, choice: Any, stream: bool) -> None:
    tool = json.loads(json.dumps(WEATHER))
    tool["function"]["parameters"]["properties"]["city"]["maxLength"] = 8
    tool["function"]["parameters"]["properties"]["days"]["maximum"] = 9
    options: dict[str, Any] = {"model": "tiny", "messages": HI, "tools": [tool], "tool_choice": choice}
    options |= {"temperature": 1, "seed": 4, "max_tokens": 200}
    if stream:
        deltas = [chunk.choices[0] for chunk in client.chat.completions.create(**options, stream=True)]
        [call] = [call for delta in deltas for call in delta.delta.tool_calls or []]
        assert deltas[-1].finish_reason == "tool_calls"
    else:
        told = client.chat.completions.create(**options)
        [call] = told.choices[0].message.tool_calls
        assert told.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) <= {"city", "days"}


@pytest.mark.parametrize("limit", [1, 7, 16])
def test_a_demanded_call_that_was_cut_is_a_call_that_was_cut(client: OpenAI, limit: int) -> None:
    """As in OpenAI's API: the reason is length, and the arguments end somewhere; there is no text."""
    options: dict[str, Any] = {"model": "tiny", "messages": HI, "tools": [WEATHER], "tool_choice": "required"}
    options |= {"temperature": 1, "seed": 4, "max_tokens": limit}
    told = client.chat.completions.create(**options).choices[0]
    pieces = [chunk.choices[0] for chunk in client.chat.completions.create(**options, stream=True)]
    assert told.finish_reason == pieces[-1].finish_reason == "length"
    assert not told.message.content and not any(piece.delta.content for piece in pieces)
    streamed = [call.function for piece in pieces for call in piece.delta.tool_calls or []]
    calls = [call.function for call in told.message.tool_calls or []]
    assert [(call.name, call.arguments) for call in calls] == [(call.name, call.arguments) for call in streamed]
    if limit == 16:  # the name and its punctuation are a dozen tokens
        [call] = calls
        assert call.name == "weather" and call.arguments.startswith("{")


@pytest.mark.parametrize(
    ("family", "template", "start"),
    [
        ("qwen", "qwen_tools", '<tool_call>\n{"name": "'),
        ("llama3", "llama3", '{"name": "'),
        ("smollm", "smollm2", '<tool_call>\n{"name": "'),
    ],
)
def test_a_demanded_call_has_the_models_own_form(tmp_path: Any, family: str, template: str, start: str) -> None:
    tokenizer = Tokenizer.from_directory(FAMILIES[family].write(tmp_path, template), {}, {})
    tools = Tools((WEATHER, _complete(TIME)), (WEATHER, _complete(TIME)))
    [constraint] = Grammars(tokenizer, tokenizer.vocab_limit).constraints(tools.grammar(tokenizer), 1, "tools")
    text = start + 'time", "' + ("parameters" if family == "llama3" else "arguments") + '": {}}'
    for token in tokenizer.encode(text, add_special_tokens=False, parse_special=False):
        assert constraint.mask()[token]
        constraint.accept(token)
    assert constraint.done == (family == "llama3")


def _complete(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "parameters": {"type": "object", "additionalProperties": False}}}


def test_names_that_need_quotes_are_quoted(llm: LLM) -> None:
    tool = _complete({"type": "function", "function": {"name": 'a"b\\ü'}})
    Grammars(llm.tokenizer, 704).constraints(Tools((tool,), (tool,)).grammar(llm.tokenizer), 1, "tools")


def test_choices_are_constrained_each_for_itself(client: OpenAI) -> None:
    told = client.chat.completions.create(
        model="tiny",
        messages=HI,
        response_format=person(),
        temperature=1,
        seed=9,
        n=3,
        max_tokens=200,  # type: ignore[call-overload]
    )
    values = [json.loads(choice.message.content)["name"] for choice in told.choices]
    assert len(set(values)) > 1


def test_thinking_that_the_prompt_opened_is_free(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    [inner] = Grammars(tokenizer, 704).constraints(json_grammar(PERSON), 1, "response_format")
    constraint = AfterThinking(inner, tokenizer, "</think>")
    for token in tokenizer.encode("Hm, {so", add_special_tokens=False, parse_special=False):
        assert constraint.mask() is None and not constraint.done
        constraint.accept(token)
    for token in tokenizer.encode("</think>", add_special_tokens=False, parse_special=True):
        constraint.accept(token)
    mask = constraint.mask()
    assert mask is not None
    assert {tokenizer.token_bytes(i)[:1] for i in range(tokenizer.vocab_limit) if mask[i]} == {b"{"}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "https://example.com/schema.json"},
        {"type": "string", "pattern": "("},
        {"type": "object", "properties": 5},
    ],
)
def test_a_schema_that_cannot_be_compiled_is_named(http: httpx.Client, schema: dict[str, Any]) -> None:
    told = http.post("/v1/chat/completions", json={"messages": HI, "response_format": person(schema), "max_tokens": 1})
    assert told.status_code == 400, told.text
    assert told.json()["error"]["param"] == "response_format"


def test_a_schema_that_is_too_complex_to_follow_fails_its_request_alone(http: httpx.Client) -> None:
    """A matcher that gives up in the middle of an answer says that it has stopped, which is no end of an answer."""
    optional = {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(600)}}
    body = {"messages": HI, "response_format": person({**optional, "additionalProperties": False}), "max_tokens": 9}
    told = http.post("/v1/chat/completions", json=body)
    assert told.status_code == 400, told.text
    message = told.json()["error"]["message"]
    assert "too complex" in message and "max is 2000" in message and "Tokens" not in message
    *_, error = events(http.post("/v1/chat/completions", json={**body, "stream": True}))
    assert error["error"]["message"] == message
    assert http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 1}).status_code == 200


def test_schemas_are_limited_in_size_and_depth() -> None:
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"items": deep}
    for schema, what in ((deep, "deep"), ({"enum": ["x" * 70_000]}, "bytes"), ([], "object")):
        with pytest.raises(ApiError, match=what):
            check_schema(schema, "schema", SETTINGS)
    check_schema(PERSON, "schema", SETTINGS)
    assert response_grammar({"type": "text"}, SETTINGS) is None


def test_a_failure_to_build_the_trie_fails_the_request_that_needs_it(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("no trie")

    monkeypatch.setattr(grammar.llguidance, "LLTokenizer", broken)
    with pytest.raises(RuntimeError, match="no trie"):
        Grammars(llm.tokenizer, 704).constraints(json_grammar({}), 1, "response_format")
