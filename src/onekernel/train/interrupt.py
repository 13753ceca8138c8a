"""Ctrl-C and SIGTERM while training: the step is finished and a checkpoint written; a second one ends at once.

torchrun repeats a signal to processes that the terminal has sent it already, so under it later ones change nothing; it
kills what has not ended after half a minute.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """A context in which the first signal is only noted; with `patient` all of them."""

    def __init__(self, *, patient: bool = False) -> None:
        self.asked = False
        self._patient = patient
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if not self._patient:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
