"""Marks of a traced kernel: times on a clock that counts from 1970."""

from __future__ import annotations

import numpy as np

from onekernel.measure.marks import Mark, read_stream


def stream(first_ns: int, cycles: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """A stream of two cycles a nanosecond, with room left."""
    words = [len(cycles), 1_000, first_ns, 1_000 + 2_000_000, first_ns + 1_000_000]
    words += [Mark.PHASE << 56 | index << 40 | cycle for index, cycle in enumerate(cycles)]
    return np.array([*words, 0], np.uint64)


def test_neighbouring_marks_are_told_apart_in_the_year_2026() -> None:
    first_ns = 1_790_000_000_123_456_789
    read = read_stream(stream(first_ns, [1_000, 1_020, 1_062]), first_ns - 500)
    assert read.values_ns.tolist() == [500.0, 510.0, 531.0]
    assert read.ids.tolist() == [0, 1, 2]
