"""A launch of the megakernel while it runs: waits for its tokens, ends it, and does not wait for ever."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from onekernel.engine.megakernel import Megakernel, Slot
from onekernel.engine.request import CancelToken
from onekernel.errors import DeviceError

_log = logging.getLogger(__name__)

STUCK_EXIT_CODE = 3

_SPINS = 20
"""Looks before the first sleep: about 20 us, which an answer's first token or a backlog often ends."""
_SLEEP_S = 20e-6
"""Linux makes 70 us of it. The kernel waits for nobody, so this delays one token's arrival and no token's making."""
_STOPPED_S = 1.0
"""A sleep that took longer: this process was stopped (Ctrl-Z, a debugger, a suspended machine)."""
_LOOK_S = 0.1
"""How often a wait without tokens asks the driver whether the launch has ended."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the host waits before it gives up on a launch, and then on the process."""

    token_s: float = 5.0
    """Longest time without a token, or to the end of a cancelled launch, before the kernel is told to stop."""
    stop_s: float = 5.0
    """Longest time that a kernel told to stop may take to end."""
    exit: Callable[[int], object] = os._exit
    """What ends the process if it does not: a CUDA context with a kernel that never ends serves nobody."""


class RunningLaunch:
    """One launch. Read its tokens in order with `token`, and call `end` whatever happens."""

    def __init__(self, megakernel: Megakernel, patience: Patience) -> None:
        self._megakernel = megakernel
        self._patience = patience
        self._failed = False

    def token(self, index: int, cancel: CancelToken) -> Slot | None:
        """Wait for token `index`; None if cancelled before it came.

        Raises DeviceError, with what every warp waited for, if the kernel had to be stopped or has stopped itself.
        """
        megakernel, spins = self._megakernel, _SPINS
        give_up = look = 0.0
        while (slot := megakernel.read(index)) is None:
            if cancel.is_set:
                return None
            if spins > 0:
                spins -= 1
                continue
            before = time.monotonic()
            time.sleep(_SLEEP_S)
            now = time.monotonic()
            if not look or now - before > _STOPPED_S:  # what passed while this process was stopped is not the kernel's
                look, give_up = now + _LOOK_S, now + self._patience.token_s
            if now > look:
                if megakernel.ended() and megakernel.read(index) is None:
                    self._fail(f"the launch has ended without token {index}")
                look = now + _LOOK_S
            if now > give_up:
                why = f"token {index} did not come within {self._patience.token_s:g} s"
                self._stop(why)
                self._fail(why)
        return slot

    def end(self) -> None:
        """End the launch if it still runs, and wait until it has ended; raises what `token` raises, but once only."""
        if self._failed:
            return
        self._megakernel.cancel()
        if not self._wait(self._patience.token_s):
            self._stop(f"a cancelled launch did not end within {self._patience.token_s:g} s")
        self._megakernel.check()

    def _stop(self, why: str) -> None:
        """Tell the kernel to give up its waits, and the process to end if it does not."""
        _log.error("%s: stopping the kernel", why)
        self._megakernel.watch.stop()
        if self._wait(self._patience.stop_s):
            return
        _log.critical(
            "the kernel did not end within %g s of being stopped; this process cannot use the GPU any more and ends "
            "with exit code %d",
            self._patience.stop_s,
            STUCK_EXIT_CODE,
        )
        self._patience.exit(STUCK_EXIT_CODE)
        self._failed = True
        raise DeviceError(f"{why}, and the kernel did not end when it was stopped", context_lost=True)

    def _fail(self, why: str) -> NoReturn:
        self._failed = True
        self._megakernel.check()
        raise DeviceError(why)

    def _wait(self, seconds: float) -> bool:
        give_up = time.monotonic() + seconds
        while not self._megakernel.ended():
            if time.monotonic() > give_up:
                return False
            time.sleep(_SLEEP_S)
        return True
