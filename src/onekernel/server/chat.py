"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from onekernel.config import SamplingParams
from onekernel.engine.prompt import Encoded, encode
from onekernel.engine.request import Completion, Delta
from onekernel.server.api_error import as_api_error, bad_request
from onekernel.server.body import read_body
from onekernel.server.event_stream import DONE, KEEP_ALIVE, EventStream, event, until_gone
from onekernel.server.fields import ChatBody
from onekernel.server.json_response import JsonResponse
from onekernel.server.logprobs import chat_logprobs
from onekernel.server.messages import template_messages
from onekernel.server.run import Run
from onekernel.server.sampling import sampling_params
from onekernel.server.service import Service
from onekernel.server.usage import timings, usage


async def chat_completions(request: Request) -> Response:
    """Answer a chat, as one object or as a stream of events."""
    service: Service = request.app.state.service
    body = await read_body(request, ChatBody, service.settings)
    engine = service.engine
    params = sampling_params(
        body,
        engine.generation_config,
        service.settings,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=_logprobs(body),
    )
    model = service.model_named(body.model)
    messages = template_messages(body.messages, service.settings)
    template = dict(body.chat_template_kwargs or {})
    prompt = await asyncio.to_thread(encode, engine.tokenizer, messages, template)
    chat = _Chat(service, body, model, prompt, params)
    if body.stream:
        return EventStream(chat.events(chat.start()))
    return await until_gone(chat.whole(), request.receive) or Response(status_code=499)


def _logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


class _Chat:
    """One chat request that is being answered."""

    def __init__(
        self, service: Service, body: ChatBody, model: str, prompt: Encoded, params: list[SamplingParams]
    ) -> None:
        self._service = service
        self._body = body
        self._prompt = prompt
        self._params = params
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def start(self) -> Run:
        """Queue every choice; raises what the engine refuses."""
        settings = self._service.settings
        return Run(self._service.engine, self._prompt, self._params, settings.request_timeout_s)

    async def whole(self) -> Response:
        """Return the answer as one object."""
        with self.start() as run:
            done = await run.completions()
        return JsonResponse(
            {
                **self._head,
                "object": "chat.completion",
                "choices": [_choice(index, one) for index, one in enumerate(done)],
                "usage": usage(done),
                "timings": timings(done[0]),
            }
        )

    async def events(self, run: Run) -> AsyncIterator[bytes]:
        """Yield the answer as events: the role, pieces, a finish_reason, the usage if it was asked for, [DONE]."""
        with_usage = bool(self._body.stream_options and self._body.stream_options.include_usage)
        usage_member = {"usage": None} if with_usage else {}
        head = {**self._head, "object": "chat.completion.chunk"}
        begun: set[int] = set()
        done: dict[int, Completion] = {}

        def chunk(index: int, delta: dict[str, Any], **members: Any) -> bytes:
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | members
            return event({**head, "choices": [choice], **usage_member})

        with run:
            try:
                async for batch in run.batches(self._service.settings.keep_alive_s):
                    pieces = [] if batch else [KEEP_ALIVE]
                    for index, one in batch:
                        if index not in begun:
                            begun.add(index)
                            pieces.append(chunk(index, {"role": "assistant", "content": ""}))
                        if isinstance(one, Completion):
                            done[index] = one
                            final = {"index": index, "delta": {}, "logprobs": None, "finish_reason": one.finish_reason}
                            pieces.append(event({**head, "choices": [final], "timings": timings(one), **usage_member}))
                        elif one.text or one.logprobs:
                            pieces.append(chunk(index, _delta(one), logprobs=chat_logprobs(one.logprobs) or None))
                    yield b"".join(pieces)
                if with_usage:
                    yield event({**head, "choices": [], "usage": usage(list(done.values()))})
            except Exception as error:
                yield event(as_api_error(error).body())
            yield DONE


def _delta(delta: Delta) -> dict[str, Any]:
    return {"reasoning_content" if delta.thinking else "content": delta.text}


def _choice(index: int, completion: Completion) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
    if completion.thinking:
        message["reasoning_content"] = completion.thinking
    return {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(completion.logprobs),
        "finish_reason": completion.finish_reason,
    }
