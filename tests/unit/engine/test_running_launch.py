"""Waiting for a launch, with a clock and a kernel that do what a test says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from onekernel.engine import running_launch
from onekernel.engine.megakernel import Slot
from onekernel.engine.request import CancelToken
from onekernel.engine.running_launch import Patience, RunningLaunch
from onekernel.errors import DeviceError

PATIENCE = Patience(token_s=5.0, stop_s=5.0)


class Clock:
    """Moves by a millisecond a sleep; once, at `stopped_at` sleeps, by an hour."""

    def __init__(self, stopped_at: int) -> None:
        self.now, self.sleeps, self.stopped_at = 0.0, 0, stopped_at

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        self.now += 3600.0 if self.sleeps == self.stopped_at else 1e-3


class Kernel:
    """Gives its token after `tokens_after` sleeps."""

    def __init__(self, clock: Clock, token_after: float) -> None:
        self.clock, self.token_after, self.stopped = clock, token_after, False
        self.asked = 0
        self.kernel = SimpleNamespace(spec=SimpleNamespace(entry="kernel"))
        self.watch = SimpleNamespace(stop=self.stop)

    def stop(self) -> None:
        self.stopped = True

    def read(self, index: int) -> Slot | None:
        return Slot(7, False, False) if self.clock.sleeps >= self.token_after else None

    def ended(self) -> bool:
        self.asked += 1
        return self.stopped

    def check(self) -> None:
        pass


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(token_after: float, stopped_at: int = 0) -> tuple[Slot | None, Kernel]:
        clock = Clock(stopped_at)
        monkeypatch.setattr(running_launch, "time", clock)
        kernel = Kernel(clock, token_after)
        return RunningLaunch(kernel, PATIENCE).token(0, CancelToken()), kernel  # type: ignore[arg-type]

    return run


@pytest.mark.complaint("K5", file="engine/running_launch.py", old="now - before > _STOPPED_S", new="False")
def test_a_process_that_was_stopped_for_an_hour_does_not_blame_the_kernel(wait: Any) -> None:
    slot, kernel = wait(token_after=60, stopped_at=50)
    assert slot == Slot(7, False, False) and not kernel.stopped


def test_a_kernel_that_is_silent_for_as_long_as_patience_lasts_is_stopped(wait: Any) -> None:
    assert wait(token_after=4900)[0] is not None
    with pytest.raises(DeviceError, match="token 0 did not come within 5 s"):
        wait(token_after=1e9)
    with pytest.raises(DeviceError, match="did not come"):  # also after a stop
        wait(token_after=1e9, stopped_at=50)


def test_while_tokens_come_the_driver_is_not_asked(wait: Any) -> None:
    """A token that comes within 0.1 s is only read; after that, a look at whether the launch has ended each 0.1 s."""
    assert wait(token_after=0)[1].asked == wait(token_after=99)[1].asked == 0
    assert wait(token_after=350)[1].asked == 3
