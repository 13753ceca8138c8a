"""The choices of one request on the engine, and their events in the order of arrival on the event loop."""

from __future__ import annotations

import asyncio
import copy
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

from onekernel.config import SamplingParams
from onekernel.engine.engine import Deliver, Engine, Event
from onekernel.engine.prompt import Encoded
from onekernel.engine.request import CancelToken, Completion, Delta
from onekernel.server.api_error import ApiError


class Run:
    """Submits every choice when it is made and cancels what still runs when it is left. Use it inside the loop.

    Raises what `Engine.submit` raises, with nothing left running.
    """

    def __init__(self, engine: Engine, prompt: Encoded, params: Sequence[SamplingParams], timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[tuple[int, Event]] = deque()
        self._woken = False
        self._wake = asyncio.Event()
        self._open = len(params)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._cancels: list[CancelToken] = []
        try:
            for index, one in enumerate(params):
                self._cancels.append(
                    engine.submit(
                        prompt.token_ids,
                        one,
                        self._deliver_to(index),
                        splitter=copy.copy(prompt.splitter),  # each choice thinks for itself
                        continues=prompt.continues,
                    )
                )
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Ask every choice to end; the engine lets go of each within one slice."""
        for token in self._cancels:
            token.set()

    def fail(self, error: BaseException) -> None:
        """End the request with an error from outside, such as the server's end. Call it on the loop."""
        self._arrived.append((0, error))
        self._wake.set()

    async def batches(self, keep_alive_s: float | None = None) -> AsyncIterator[list[tuple[int, Delta | Completion]]]:
        """Yield what has arrived since the last time, with the choice's index, until every choice has its Completion.

        An empty batch: nothing came for `keep_alive_s`. Raises the error of the first choice that fails, and ApiError
        504 after the time-out.
        """
        while self._open:
            batch = []
            for index, event in await self._next(keep_alive_s):
                if isinstance(event, BaseException):
                    raise event
                self._open -= isinstance(event, Completion)
                batch.append((index, event))
            yield batch

    async def completions(self) -> list[Completion]:
        """Wait for the end and return the completions in the order of the choices."""
        done: dict[int, Completion] = {}
        async for batch in self.batches():
            done |= {index: event for index, event in batch if isinstance(event, Completion)}
        return [done[index] for index in sorted(done)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _deliver_to(self, index: int) -> Deliver:
        arrived, wake = self._arrived, self._loop.call_soon_threadsafe

        def deliver(event: Event) -> None:
            arrived.append((index, event))
            if not self._woken:  # the reader is not on its way yet; one wake-up serves all that arrives until then
                self._woken = True
                wake(self._wake.set)

        return deliver

    async def _next(self, keep_alive_s: float | None) -> list[tuple[int, Event]]:
        if not self._arrived:
            rest = self._deadline - time.monotonic()
            patience = rest if keep_alive_s is None else min(keep_alive_s, rest)
            try:
                async with asyncio.timeout(max(patience, 0)):
                    await self._wake.wait()
            except TimeoutError:
                if time.monotonic() < self._deadline:
                    return []
                raise ApiError(
                    504,
                    f"the request took longer than {self._timeout_s:g} s; ask for a smaller max_tokens, or start the "
                    "server with a larger --request-timeout",
                    kind="timeout_error",
                    code="timeout",
                ) from None
        self._wake.clear()
        self._woken = False
        batch = []
        while self._arrived:
            batch.append(self._arrived.popleft())
        return batch
