"""Whose turn it is on the device."""

from __future__ import annotations

import threading
from collections import deque

from onekernel.engine.job import Job
from onekernel.engine.request import CancelToken
from onekernel.errors import EngineClosedError, QueueFullError


class Turns:
    """Requests in a ring: each has a turn, then goes to the end. Newcomers join at the end.

    Those that found no pages stand aside, in order, with all newcomers behind them, until pages are given back. Only
    the engine's thread calls `next`, `again`, `set_aside`, `pages_freed` and `withdraw`.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._ready: deque[Job] = deque()
        self._aside: deque[Job] = deque()
        self._current: Job | None = None
        self.closed = False
        self._changed = threading.Condition()

    @property
    def others(self) -> bool:
        """Whether somebody else could have a turn now."""
        return bool(self._ready)

    @property
    def others_hold_pages(self) -> bool:
        """Whether somebody else has had a turn, so that pages will come back."""
        with self._changed:
            return any(job.sequence is not None for job in self._ready)

    def join(self, job: Job) -> None:
        """Queue a request; raises QueueFullError, or EngineClosedError after `close`."""
        with self._changed:
            if self.closed:
                raise EngineClosedError("the engine is closed; create a new one")
            _, waiting = self.count()
            if waiting >= self._max_waiting and (self._current is not None or self._ready):
                raise QueueFullError(waiting, self._max_waiting)
            (self._aside or self._ready).append(job)
            self._changed.notify()

    def count(self) -> tuple[int, int]:
        """Return how many requests have had a turn or have it, and how many wait for their first one."""
        with self._changed:
            queued = [*self._ready, *self._aside]
            waiting = sum(job.sequence is None and not job.cancel.is_set for job in queued)
            started = sum(job.sequence is not None for job in queued)
            return started + (self._current is not None), waiting

    def next(self) -> Job | None:
        """Wait for a request and return it as the current one; None once closed."""
        with self._changed:
            self._current = None
            while not self._ready and not self.closed:
                self._changed.wait()
            if self.closed:
                return None
            self._current = self._ready.popleft()
            return self._current

    def again(self, job: Job) -> None:
        """Queue a request for its next turn."""
        with self._changed:
            self._current = None
            self._ready.append(job)

    def set_aside(self, job: Job) -> None:
        """Let a request wait for pages, and those behind it that have none either."""
        with self._changed:
            self._current = None
            behind = [other for other in self._ready if other.sequence is None]
            self._aside.extend([job, *behind])
            self._ready = deque(other for other in self._ready if other.sequence is not None)

    def pages_freed(self) -> None:
        """Let those that stand aside try again, before all others: they have waited longest."""
        with self._changed:
            self._ready.extendleft(reversed(self._aside))
            self._aside.clear()

    def withdraw(self, token: CancelToken) -> Job | None:
        """Remove the request with this token and return it, unless it is the current one or has ended."""
        with self._changed:
            for queue in (self._ready, self._aside):
                for job in queue:
                    if job.cancel is token:
                        queue.remove(job)
                        return job
        return None

    def close(self) -> bool:
        """Take no more requests and cancel the current one; return False if that was so already."""
        with self._changed:
            if self.closed:
                return False
            self.closed = True
            if self._current is not None:
                self._current.cancel.set()
            self._changed.notify()
            return True

    def clear(self) -> list[Job]:
        """Remove all requests that wait for a turn and return them."""
        with self._changed:
            jobs = [*self._ready, *self._aside]
            self._ready.clear()
            self._aside.clear()
            return jobs
