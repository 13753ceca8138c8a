"""Stop strings: end the text before the first of them, and let no part of one through."""

from __future__ import annotations

from collections.abc import Sequence

from onekernel.errors import ConfigError


class StopMatcher:
    """Finds stop strings in text that comes in pieces; the result does not depend on where it was cut.

    The match that starts first wins; of two that start together, the shorter, because it is complete first. When a
    string is complete but one that started earlier may still become so, the decision waits for more text or `flush`.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ConfigError("a stop string is empty and would match at once; leave it out")
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.hit: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """Take a piece of text; return what can be shown: all but the longest tail that may begin a stop string."""
        if self.hit is not None:
            return ""
        self._held += text
        start, stop = self._first_complete()
        pending = self._first_pending()
        if stop is not None and start <= pending:
            return self._end(start, stop)
        return self._release(pending)

    def flush(self) -> str:
        """End the text: return what was held back, up to a stop string if one is complete (then `hit` is set)."""
        if self.hit is not None:
            return ""
        start, stop = self._first_complete()
        return self._release(len(self._held)) if stop is None else self._end(start, stop)

    def _first_complete(self) -> tuple[int, str | None]:
        found = [(self._held.find(stop), len(stop), stop) for stop in self._stops if stop in self._held]
        start, _, stop = min(found, default=(len(self._held), 0, None))
        return start, stop

    def _first_pending(self) -> int:
        """Return where the longest tail begins that is a proper beginning of a stop string."""
        size = len(self._held)
        for start in range(max(0, size - self._longest + 1), size):
            tail = self._held[start:]
            if any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._stops):
                return start
        return size

    def _release(self, end: int) -> str:
        shown, self._held = self._held[:end], self._held[end:]
        return shown

    def _end(self, start: int, stop: str) -> str:
        self.hit = stop
        shown, self._held = self._held[:start], ""
        return shown
