"""When a command ends that nobody waits for any more: SIGTERM unwinds it, and so does its parent's death.

Unwinding closes the engine, which cancels the running launch, so the GPU is free when the process has gone.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

GRACE_S = 15.0
"""Longest time that unwinding may take after the parent's death; a stuck kernel is given up after ten seconds."""

_LOOK_S = 0.5


def end_in_order() -> None:
    """Make SIGTERM unwind the process, and watch its parent; for a process that runs one command."""
    signal.signal(signal.SIGTERM, _unwind)
    if not is_detached():
        threading.Thread(target=watch_parent, name="onekernel-parent", daemon=True).start()


def is_detached() -> bool:
    """Return whether this process was meant to outlive its parent: started by nohup, setsid, a service manager."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN or os.getsid(0) == os.getpid()


def watch_parent(
    parent: Callable[[], int] = os.getppid, end: Callable[[int], object] = os._exit, grace_s: float = GRACE_S
) -> None:
    """Wait for the parent's death, say so, and end this process like SIGTERM, or at once if that takes too long."""
    first = parent()
    while parent() == first:
        time.sleep(_LOOK_S)
    import logging  # a command has it by now; --help does without

    logging.getLogger(__name__).warning(
        "process %d, which started this one, has ended, and so does this one; what shall outlive it is started with "
        "nohup or setsid, or by a service manager",
        first,
    )
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    end(128 + signal.SIGTERM)


def _unwind(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)
