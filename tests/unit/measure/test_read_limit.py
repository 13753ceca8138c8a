from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onekernel.engine.backend import MemoryReport
from onekernel.measure import read_limit
from onekernel.measure.read_limit import read_limit_us


def loaded(device: str = "cuda:0", weights_bytes: int = 10**9) -> Any:
    backend = SimpleNamespace(device=device, memory=MemoryReport(weights_bytes, 0, 0))
    config = SimpleNamespace(parameters_read_per_token=10**8)
    return SimpleNamespace(engine=SimpleNamespace(backend=backend), config=config, dtype=torch.bfloat16)


@pytest.fixture
def read_rate(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], float]], None]:
    """Replace the measurement on a GPU by a function."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return lambda rate: monkeypatch.setattr(read_limit, "read_bandwidth", lambda device: rate())


def test_the_bytes_of_a_token_over_the_measured_rate(read_rate: Any) -> None:
    read_rate(lambda: 4e12)
    assert read_limit_us(loaded()) == pytest.approx(2 * 10**8 / 4e12 * 1e6)  # all but the embedding's other rows
    assert read_limit_us(loaded(weights_bytes=5 * 10**7)) == pytest.approx(5e7 / 4e12 * 1e6)  # packed


def test_neurons_that_rest_are_not_read(read_rate: Any) -> None:
    read_rate(lambda: 4e12)
    sparse = loaded()
    sparse.engine.backend.resting_bytes = 10**8
    assert read_limit_us(sparse) == pytest.approx(10**8 / 4e12 * 1e6)


def test_none_on_a_cpu_or_without_room(read_rate: Any) -> None:
    def full() -> float:
        raise torch.OutOfMemoryError("no room")

    read_rate(full)
    assert read_limit_us(loaded("cpu")) is None
    assert read_limit_us(loaded()) is None
