"""What chat and plain completions share: run the choices, answer as one object or as a stream of events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from onekernel.engine.request import Completion, Delta
from onekernel.server.api_error import as_api_error
from onekernel.server.event_stream import DONE, KEEP_ALIVE, EventStream, event, until_gone
from onekernel.server.fields import Generation
from onekernel.server.json_response import JsonResponse
from onekernel.server.run import Choice, Run
from onekernel.server.service import Service
from onekernel.server.usage import timings, usage


class Form(Protocol):
    """How one endpoint writes the parts of an answer."""

    id_prefix: str
    object: str
    chunk_object: str

    def whole(self, index: int, completion: Completion) -> dict[str, Any]:
        """Return a finished choice."""
        ...

    def begin(self, index: int) -> list[dict[str, Any]]:
        """Return what a streamed choice holds before its first piece."""
        ...

    def pieces(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Return a streamed choice's next pieces; none for a token that shows nothing yet."""
        ...

    def end(self, index: int, completion: Completion) -> list[dict[str, Any]]:
        """Return the last pieces; the very last one has the finish_reason."""
        ...


async def answer(
    request: Request, service: Service, body: Generation, model: str, choices: Sequence[Choice], form: Form
) -> Response:
    """Answer a request; raises what the engine refuses before the first byte is sent."""
    answering = _Answering(service, body, model, choices, form)
    run = Run(service, choices)
    if body.stream:
        return EventStream(answering.events(run), run.cancel)
    with run:
        response = await until_gone(answering.whole(run), request.receive)
    return response or Response(status_code=499)  # which nobody reads


class _Answering:
    """One request that is being answered."""

    def __init__(self, service: Service, body: Generation, model: str, choices: Sequence[Choice], form: Form) -> None:
        self._service = service
        self._form = form
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._prompts = len({id(choice.prompt) for choice in choices})
        self._head = {"id": f"{form.id_prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    async def whole(self, run: Run) -> Response:
        """Return the answer as one object."""
        done = await run.completions()
        return JsonResponse(
            {
                **self._head,
                "object": self._form.object,
                "choices": [self._form.whole(index, one) for index, one in enumerate(done)],
                "usage": usage(done, self._prompts),
                "timings": timings(done[0]),
            }
        )

    async def events(self, run: Run) -> AsyncGenerator[bytes]:
        """Yield events: beginning, pieces and end of each choice, the usage if it was asked for, [DONE]."""
        head: dict[str, Any] = {**self._head, "object": self._form.chunk_object}
        usage_member = {"usage": None} if self._with_usage else {}
        begun: set[int] = set()
        done: dict[int, Completion] = {}
        try:
            async for batch in run.batches(self._service.settings.keep_alive_s):
                events = [] if batch else [KEEP_ALIVE]
                for index, one in batch:
                    pieces = [] if index in begun else self._form.begin(index)
                    begun.add(index)
                    if isinstance(one, Delta):
                        pieces += self._form.pieces(index, one)
                    else:
                        done[index] = one
                        pieces += self._form.end(index, one)
                    events += [event({**head, "choices": [piece], **usage_member}) for piece in pieces[:-1]]
                    if pieces:
                        more = {"timings": timings(one)} if isinstance(one, Completion) else {}
                        events.append(event({**head, "choices": [pieces[-1]], **usage_member, **more}))
                if events:
                    yield b"".join(events)
            if self._with_usage:
                in_order = [done[index] for index in sorted(done)]
                yield event({**head, "choices": [], "usage": usage(in_order, self._prompts)})
        except Exception as error:
            yield event(as_api_error(error).body())
        yield DONE
