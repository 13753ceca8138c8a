"""A chat answer in OpenAI's form: content, reasoning_content, tool calls."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from onekernel.engine.request import Completion, Delta
from onekernel.server.logprobs import chat_logprobs
from onekernel.server.tool_calls import ToolCall, ToolCallReader


class ChatForm:
    """Writes chat.completion objects and chunks. `reader`: makes what finds a choice's tool calls."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, reader: Callable[[], ToolCallReader] | None) -> None:
        self._reader = reader
        self._readers: dict[int, ToolCallReader] = {}

    def whole(self, index: int, completion: Completion) -> dict[str, Any]:
        """Return a finished choice."""
        text = completion.text
        calls: list[ToolCall] = []
        if self._reader is not None:
            reader = self._reader()
            before, calls = reader.push(text)
            after, last = reader.flush(cut=completion.finish_reason == "length")
            text, calls = before + after, calls + last
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if completion.thinking:
            message["reasoning_content"] = completion.thinking
        if calls:
            message |= {"content": text.strip() or None, "tool_calls": [_call(call) for call in calls]}
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(completion.logprobs),
            "finish_reason": _finish_reason(completion, bool(calls)),
        }

    def begin(self, index: int) -> list[dict[str, Any]]:
        """Return the role."""
        if self._reader is not None:
            self._readers[index] = self._reader()
        return [_chunk(index, {"role": "assistant", "content": ""})]

    def pieces(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Return the pieces of one delta."""
        reader = self._readers.get(index)
        if delta.thinking or reader is None:
            made = [{"reasoning_content" if delta.thinking else "content": delta.text}] if delta.text else []
        else:
            made = self._deltas(reader, *reader.push(delta.text))
        if delta.logprobs:
            first, *rest = made or [{"content": ""}]
            logprobs = chat_logprobs(delta.logprobs)
            return [_chunk(index, first) | {"logprobs": logprobs}, *(_chunk(index, one) for one in rest)]
        return [_chunk(index, one) for one in made]

    def end(self, index: int, completion: Completion) -> list[dict[str, Any]]:
        """Return what was held back and the finish_reason."""
        reader = self._readers.get(index)
        cut = completion.finish_reason == "length"
        held = [] if reader is None else self._deltas(reader, *reader.flush(cut=cut))
        called = reader is not None and reader.found > 0
        last = _chunk(index, {}) | {"finish_reason": _finish_reason(completion, called)}
        return [*(_chunk(index, one) for one in held), last]

    @staticmethod
    def _deltas(reader: ToolCallReader, text: str, calls: list[ToolCall]) -> list[dict[str, Any]]:
        first = reader.found - len(calls)
        made: list[dict[str, Any]] = [{"content": text}] if text else []
        return made + [{"tool_calls": [{"index": first + n, **_call(call)}]} for n, call in enumerate(calls)]


def _chunk(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _finish_reason(completion: Completion, called: bool) -> str:
    """Return the reason; an answer that was cut off stays cut off, whatever calls it holds."""
    return "tool_calls" if called and completion.finish_reason == "stop" else completion.finish_reason
