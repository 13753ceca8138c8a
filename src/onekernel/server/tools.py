"""The tools of a request: checked, put before the model, and the grammar of a call that is demanded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onekernel.server.api_error import ApiError, bad_request
from onekernel.server.fields import ChatBody
from onekernel.server.grammar import check_schema
from onekernel.server.settings import ServerSettings
from onekernel.server.tool_calls import CLOSE, OPEN, ToolCallReader
from onekernel.text.tokenizer import Tokenizer

_FALLBACK = """You can call these tools:
{tools}
To call one, answer with nothing but
{open}
{{"name": "the tool's name", "arguments": {{"the argument's name": "its value"}}}}
{close}"""


@dataclass(frozen=True, slots=True)
class Tools:
    """What a request says about tools. `demanded`: the tools of which one must be called now; none: as it likes."""

    offered: tuple[dict[str, Any], ...] = ()
    demanded: tuple[dict[str, Any], ...] = ()
    parallel: bool = True

    def reader(self) -> ToolCallReader:
        """Return what finds calls in one answer."""
        most = None if self.parallel else 1
        return ToolCallReader((_name(tool) for tool in self.offered), most, demanded=bool(self.demanded))

    def grammar(self, tokenizer: Tokenizer) -> str:
        """Return the Lark grammar of one call of a demanded tool, in the form that the model's template writes."""
        sources = _templates(tokenizer)
        arguments = "parameters" if OPEN not in sources and '"parameters": ' in sources else "arguments"
        tagged = arguments == "arguments" and _tag_is_text(tokenizer)
        rules: list[str] = []
        for n, tool in enumerate(self.demanded):
            opening = _lark('{"name": ' + _json(_name(tool)) + ', "' + arguments + '": ')
            schema = json.dumps({**_parameters(tool), **SPACED})
            rules += [f'call{n}: {opening} arguments{n} "}}"', f"arguments{n}: %json {schema}"]
        call = " | ".join(f"call{n}" for n in range(len(self.demanded)))
        opened, closed = (_lark(f"{OPEN}\n"), _lark(f"\n{CLOSE}")) if tagged else ("", "")
        return "\n".join([f"start: {opened} call {closed}", f"call: {call}", *rules])


SPACED = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""What llguidance is told: JSON on one line with a space after comma and colon, as models write it in calls."""


def read_tools(body: ChatBody, settings: ServerSettings) -> Tools | None:
    """Return the request's tools, None if it offers none or forbids their use; raises ApiError naming what is wrong."""
    offered = tuple(body.tools or ())
    choice = "auto" if body.tool_choice is None else body.tool_choice
    if not offered:
        if choice not in ("auto", "none"):
            raise bad_request(f"tool_choice is {choice!r:.80}, but there are no tools", "tool_choice")
        return None
    if len(offered) > settings.max_tools:
        raise bad_request(f"there are {len(offered)} tools; at most {settings.max_tools} are allowed", "tools")
    for index, tool in enumerate(offered):
        _check(tool, f"tools[{index}]", settings)
    offered = tuple(_complete(tool) for tool in offered)
    if choice == "none":
        return None
    return Tools(offered, _demanded(offered, choice), body.parallel_tool_calls is not False)


def with_tools(
    messages: list[dict[str, Any]], template: dict[str, Any], tools: Tools | None, tokenizer: Tokenizer
) -> None:
    """Hand the tools to the model's template; a template without a place for them gets a system message instead."""
    if tools is None:
        return
    if "tools" in _templates(tokenizer):
        template["tools"] = list(tools.offered)
        return
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools.offered)
    text = _FALLBACK.format(tools=listed, open=OPEN, close=CLOSE)
    if messages[0]["role"] == "system":
        messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
    else:
        messages.insert(0, {"role": "system", "content": text})


def _demanded(offered: Sequence[dict[str, Any]], choice: str | Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    if choice == "auto":
        return ()
    if choice == "required":
        return tuple(offered)
    wrong: ApiError = bad_request(
        f"tool_choice is {choice!r:.80}; it must be none, auto, required or "
        '{"type": "function", "function": {"name": ...}} with the name of one of the tools',
        "tool_choice",
    )
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    found = tuple(tool for tool in offered if _name(tool) == name)
    if not found:
        raise wrong
    return found[:1]


def _check(tool: Mapping[str, Any], place: str, settings: ServerSettings) -> None:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise bad_request(f'{place} must be {{"type": "function", "function": {{...}}}}', place)
    name = function.get("name")
    if not isinstance(name, str) or not name or len(name) > 256:
        raise bad_request(f"{place}.function.name must be a string of 1 to 256 characters", place)
    if not isinstance(function.get("description", ""), str | None):
        raise bad_request(f"{place}.function.description is not a string", place)
    parameters = function.get("parameters")
    if parameters is not None:
        check_schema(parameters, f"{place}.function.parameters", settings)


def _complete(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the tool with the members that templates take for granted."""
    function = {name: value for name, value in tool["function"].items() if value is not None}
    function.setdefault("description", "")
    function["parameters"] = {"type": "object", "properties": {}} | function.get("parameters", {})
    return {**tool, "function": function}


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = tool["function"]["parameters"]
    return parameters


def _name(tool: Mapping[str, Any]) -> str:
    name: str = tool["function"]["name"]
    return name


def _templates(tokenizer: Tokenizer) -> str:
    return "\n".join(tokenizer.chat_template.sources.values()) if tokenizer.chat_template else ""


def _tag_is_text(tokenizer: Tokenizer) -> bool:
    """Return whether the tag shows up in an answer's text: where it is a special token, it does not."""
    ids = tokenizer.encode(OPEN, add_special_tokens=False, parse_special=True)
    return tokenizer.skipped_token_ids.isdisjoint(ids)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _lark(text: str) -> str:
    """Return a text as a literal of llguidance's Lark, which has JSON's escapes."""
    return _json(text)
