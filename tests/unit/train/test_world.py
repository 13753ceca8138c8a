"""What a run changes in its process, and puts back."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from onekernel.train import world
from onekernel.train.interrupt import Interrupt


def state() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory


def test_a_run_on_a_gpu_is_repeatable_and_then_all_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = state()
    with pytest.raises(KeyError), world._repeatable(True):
        assert state() == (True, False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        raise KeyError
    assert state() == before
    with world._repeatable(False):
        assert state() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_torchrun_may_repeat_a_signal(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interrupt(patient=True) as interrupt:
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert interrupt.asked
    assert signal.getsignal(number) is before
