"""The choices of one request on the engine, and their events in the order of arrival on the event loop."""

from __future__ import annotations

import asyncio
import copy
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from onekernel.config import SamplingParams
from onekernel.engine.engine import Deliver, Event
from onekernel.engine.prompt import Encoded
from onekernel.engine.request import CancelToken, Completion, Constraint, Delta
from onekernel.server.api_error import ApiError

if TYPE_CHECKING:
    from onekernel.server.service import Service


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer that is asked for."""

    prompt: Encoded
    params: SamplingParams
    constraint: Constraint | None = None


class Run:
    """Submits every choice when it is made and cancels what still runs when it is left. Use it inside the loop.

    Raises what `Engine.submit` raises, with nothing left running.
    """

    def __init__(self, service: Service, choices: Sequence[Choice]) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[tuple[int, Event]] = deque()
        self._woken = False
        self._wake = asyncio.Event()
        self._open = len(choices)
        self._deadline = time.monotonic() + service.settings.request_timeout_s
        self._cancels: list[CancelToken] = []
        try:
            for index, choice in enumerate(choices):
                self._cancels.append(self._submit(choice, self._deliver_to(index)))
        except BaseException:
            self.cancel()
            raise
        service.runs.add(self)

    def cancel(self) -> None:
        """Ask every choice to end; the engine lets go of each within one slice."""
        self._service.runs.discard(self)
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
            batch: list[tuple[int, Delta | Completion]] = []
            failure: BaseException | None = None
            for index, event in await self._next(keep_alive_s):
                if isinstance(event, BaseException):
                    failure = event
                    break
                if isinstance(event, Completion):
                    if event.finish_reason == "cancelled":
                        failure = ApiError(503, "the engine was closed during this answer", kind="server_error")
                        break
                    self._open -= 1
                    self._service.metrics.answered(event)
                batch.append((index, event))
            if batch or failure is None:
                yield batch  # what came before a failure still reaches the client
            if failure is not None:
                raise failure

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

    def _submit(self, choice: Choice, deliver: Deliver) -> CancelToken:
        prompt = choice.prompt
        return self._service.engine.submit(
            prompt.token_ids,
            choice.params,
            deliver,
            splitter=copy.copy(prompt.splitter),  # each choice thinks for itself
            continues=prompt.continues,
            constraint=choice.constraint,
        )

    def _deliver_to(self, index: int) -> Deliver:
        arrived, wake = self._arrived, self._loop.call_soon_threadsafe

        def deliver(event: Event) -> None:
            arrived.append((index, event))
            if not self._woken:  # else the reader is on its way, and one wake-up serves all that arrives until then
                self._woken = True
                wake(self._wake.set)

        return deliver

    async def _next(self, keep_alive_s: float | None) -> list[tuple[int, Event]]:
        """Return what has arrived, after waiting for it; nothing only after `keep_alive_s`."""
        while True:
            self._wake.clear()
            self._woken = False  # before the look: what arrives after it wakes, what arrived before it is seen
            if self._arrived:
                break
            rest = max(self._deadline - time.monotonic(), 0.0)
            try:
                async with asyncio.timeout(rest if keep_alive_s is None else min(keep_alive_s, rest)):
                    await self._wake.wait()  # may also be the wake-up of an event that was taken already
            except TimeoutError:
                if time.monotonic() < self._deadline:
                    return []
                raise self._too_late() from None
        if time.monotonic() > self._deadline:
            raise self._too_late()
        batch = []
        while self._arrived:
            batch.append(self._arrived.popleft())
        return batch

    def _too_late(self) -> ApiError:
        return ApiError(
            504,
            f"the request took longer than {self._service.settings.request_timeout_s:g} s; ask for a smaller "
            "max_tokens, or start the server with a larger --request-timeout",
            kind="timeout_error",
            code="timeout",
        )
