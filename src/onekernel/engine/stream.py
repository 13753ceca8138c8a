"""A running answer as its caller sees it: an iterator of deltas that cancels the request when closed."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Self

from onekernel.engine.engine import Deliver, Event
from onekernel.engine.request import CancelToken, Completion, Delta

Submit = Callable[[Deliver], CancelToken]


class AnswerStream(Iterator[Delta]):
    """Deltas of one answer. After the last one `completion` is set. Closing, or leaving a `with`, cancels.

    Iterating raises what made the request fail.
    """

    def __init__(self, submit: Submit) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._ended = False
        self.completion: Completion | None = None
        self._cancel = submit(self._events.put)

    def __next__(self) -> Delta:
        if self._ended:
            raise StopIteration
        event = self._events.get()
        if isinstance(event, Delta):
            return event
        self._ended = True
        if isinstance(event, BaseException):
            raise event
        self.completion = event
        raise StopIteration

    def cancel(self) -> None:
        """Ask the request to end; what was generated still arrives, with finish_reason "cancelled"."""
        self._cancel.set()

    def result(self) -> Completion:
        """Wait for the end and return the completion."""
        for _ in self:
            pass
        if self.completion is None:
            raise RuntimeError("this stream already ended with an error or was closed")
        return self.completion

    def close(self) -> None:
        """Cancel and wait until the engine has let the request go."""
        self._cancel.set()
        with contextlib.suppress(Exception):
            for _ in self:
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._ended and hasattr(self, "_cancel"):
            self._cancel.set()


class AsyncAnswerStream(AsyncIterator[Delta]):
    """The same for asyncio; create it inside the loop that reads it."""

    def __init__(self, submit: Submit) -> None:
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._ended = False
        self.completion: Completion | None = None

        def deliver(event: Event) -> None:
            loop.call_soon_threadsafe(self._events.put_nowait, event)

        self._cancel = submit(deliver)

    async def __anext__(self) -> Delta:
        if self._ended:
            raise StopAsyncIteration
        try:
            event = await self._events.get()
        except asyncio.CancelledError:
            self._cancel.set()
            raise
        if isinstance(event, Delta):
            return event
        self._ended = True
        if isinstance(event, BaseException):
            raise event
        self.completion = event
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Ask the request to end; what was generated still arrives."""
        self._cancel.set()

    async def result(self) -> Completion:
        """Wait for the end and return the completion."""
        async for _ in self:
            pass
        if self.completion is None:
            raise RuntimeError("this stream already ended with an error or was closed")
        return self.completion

    async def aclose(self) -> None:
        """Cancel and wait until the engine has let the request go."""
        self._cancel.set()
        with contextlib.suppress(Exception):
            async for _ in self:
                pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._ended and hasattr(self, "_cancel"):
            self._cancel.set()
