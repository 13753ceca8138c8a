"""What the engine's thread delivers reaches the reader on the event loop, whenever it comes."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

from onekernel.engine.engine import Deliver
from onekernel.engine.request import Completion, Delta, Timings, Usage
from onekernel.server.run import Run
from onekernel.server.settings import ServerSettings

DONE = Completion("ab", "", (1, 2), "stop", Usage(1, 2), Timings(), 0, (1,), None)


def elsewhere(deliver: Deliver, event: Delta | Completion) -> None:
    """Deliver from another thread, as the engine does, and wait until that is done."""
    thread = threading.Thread(target=deliver, args=(event,))
    thread.start()
    thread.join()


class Interrupted(deque[Any]):
    """Events of which the first is taken at the very moment at which the engine's thread delivers another."""

    then: Deliver | None = None

    def popleft(self) -> Any:
        taken = super().popleft()
        deliver, self.then = self.then, None
        if deliver is not None:
            elsewhere(deliver, Delta("b"))
        return taken


def test_an_event_that_comes_while_the_reader_takes_another_costs_no_wake_up() -> None:
    async def answered() -> list[Completion]:
        service: Any = SimpleNamespace(
            metrics=SimpleNamespace(answered=lambda _completion: None),
            runs=set(),
            settings=ServerSettings(request_timeout_s=10.0),
        )
        run = Run(service, [])
        run._arrived, run._open = (arrived := Interrupted()), 1
        arrived.then = deliver = run._deliver_to(0)
        elsewhere(deliver, Delta("a"))
        reader = asyncio.ensure_future(run.completions())
        while arrived or arrived.then is not None:
            await asyncio.sleep(0)
        for _ in range(10):  # the wake-up for what has been taken already is spent, and the reader waits again
            await asyncio.sleep(0)
        elsewhere(deliver, DONE)
        return await reader

    assert asyncio.run(answered()) == [DONE]
