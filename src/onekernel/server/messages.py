"""OpenAI's messages -> what chat templates expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from onekernel.server.api_error import ApiError, bad_request
from onekernel.server.settings import ServerSettings

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def template_messages(messages: Sequence[Mapping[str, Any]], settings: ServerSettings) -> list[dict[str, Any]]:
    """Return the messages with text content; the developer's role is system, arguments of tool calls are objects.

    Raises ApiError naming the message for unknown roles, for images and the like, and for too many messages.
    """
    if not messages:
        raise bad_request("messages is empty; give at least one with a role and a content", "messages")
    if len(messages) > settings.max_messages:
        raise bad_request(
            f"there are {len(messages)} messages; at most {settings.max_messages} are allowed", "messages"
        )
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_request(f"{place}.role is {role!r:.80}; it must be one of {', '.join(_ROLES)}", f"{place}.role")
    calls = message.get("tool_calls")
    made: dict[str, Any] = {"role": _ROLES[role], "content": _content(message.get("content"), place, bool(calls))}
    if calls and role == "assistant":
        made["tool_calls"] = _calls(calls, f"{place}.tool_calls")
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = message.get(name)
        if value is not None:
            if not isinstance(value, str):
                raise bad_request(f"{place}.{name} is not a string", f"{place}.{name}")
            made[name] = value
    return made


def _content(content: Any, place: str, has_calls: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and has_calls:
        return ""
    if not isinstance(content, list):
        raise bad_request(
            f"{place}.content is {_kind(content)}; it must be a string or a list of text parts", f"{place}.content"
        )
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text"):
            raise bad_request(
                f"{place}.content[{index}] has the type {kind!r:.80}; this model reads parts of type 'text' only",
                f"{place}.content",
                "unsupported_content",
            )
        if not isinstance(part.get("text"), str):
            raise bad_request(f"{place}.content[{index}].text is not a string", f"{place}.content")
        texts.append(part["text"])
    return "\n".join(texts)


def _calls(calls: Any, place: str) -> list[dict[str, Any]]:
    wrong: ApiError = bad_request(
        f"{place} must be a list of objects with a function that has a name and arguments", place
    )
    if not isinstance(calls, list):
        raise wrong
    made = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong
        arguments = _arguments(function.get("arguments", "{}"))
        made.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return made


def _arguments(arguments: Any) -> Any:
    """Return a call's arguments as templates expect them: an object; what is no JSON object stays as it is."""
    if isinstance(arguments, str):
        try:
            decoded = msgspec.json.decode(arguments)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            return arguments
        return decoded if isinstance(decoded, dict) else arguments
    return arguments


def _kind(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"


_OWN_OPTIONS = ("messages", "tools", "parse_special_in_content", "check_length", "self")


def template_options(given: Mapping[str, Any] | None, reasoning_effort: str | None) -> dict[str, Any]:
    """Return what goes to the chat template beside the messages; raises ApiError for names that are not its own."""
    options = dict(given or {})
    for name in _OWN_OPTIONS:
        if name in options:
            raise bad_request(f"chat_template_kwargs may not hold {name}", "chat_template_kwargs")
    if reasoning_effort is not None:
        options.setdefault("reasoning_effort", reasoning_effort)
    return options
