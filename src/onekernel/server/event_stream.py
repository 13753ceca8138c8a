"""Server-sent events, and noticing that a client has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

KEEP_ALIVE = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    """Return one event with a JSON value."""
    return b"data: " + _encode(value) + b"\n\n"


class EventStream(Response):
    """Sends what `events` yields and calls `close` at the end, which comes at once when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], close: Callable[[], None]) -> None:
        self._events = events
        self._close = close
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await until_gone(self._send(send), receive)
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for piece in events:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """Return the result of `work`; cancel it and return None if the client leaves first. The body has been read."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
