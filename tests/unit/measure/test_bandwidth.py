"""The memory's speed is plausible and quickly measured."""

from __future__ import annotations

import time

from onekernel.measure.bandwidth import read_bandwidth


def test_a_cpu_reads_at_a_plausible_rate() -> None:
    """Between an old single core and a large server socket."""
    start = time.perf_counter()
    rate = read_bandwidth("cpu", seconds=0.05)
    assert 2e8 < rate < 2e12
    assert time.perf_counter() - start < 20
