"""What a traced kernel wrote down: the counterpart of kernels/tile/trace.cuh."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from onekernel.errors import DeviceError

HEAD_WORDS = 5
"""Words before a stream's marks: their number, cycles and nanoseconds at the start, and both at the end."""
COPY_BYTES = 16
"""Unit of the `id` of ISSUED."""

_CYCLE_BITS = 40


class Mark(IntEnum):
    """What a word says; see the same names in trace.cuh."""

    PHASE = 1
    TAKEN = 2
    WEIGHTS = 3
    MULTIPLIED = 4
    MET = 5
    END = 6
    ISSUED = 7
    LANDED = 8
    FULL = 9


@dataclass(frozen=True, eq=False, slots=True)
class Stream:
    """Marks of one thread in their order: kinds (Mark), ids, and values in nanoseconds.

    A value is a time on the clock that all SMs share, since the epoch given; of WEIGHTS it is a duration.
    """

    kinds: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    values_ns: npt.NDArray[np.float64]

    def times_ns(self, kind: Mark) -> npt.NDArray[np.float64]:
        """Return the values of all marks of one kind."""
        times: npt.NDArray[np.float64] = self.values_ns[self.kinds == kind]
        return times


def read_stream(words: npt.NDArray[np.uint64], epoch_ns: int = 0) -> Stream:
    """Read one stream, (room,) words. Raises DeviceError if it holds no marks, or not all.

    Times count from `epoch_ns`: a GPU's clock counts from 1970, where a float64 tells times 256 ns apart.
    """
    count, first_cycle, first_ns, last_cycle, last_ns = (int(word) for word in words[:HEAD_WORDS])
    if not 0 < count <= words.size - HEAD_WORDS or last_cycle <= first_cycle:
        raise DeviceError(f"a trace holds {count} marks of at most {words.size - HEAD_WORDS}: the kernel left early")
    if count == words.size - HEAD_WORDS:
        raise DeviceError(f"a trace is full at {count} marks, so its end is missing: ask for a shorter context")
    marks = words[HEAD_WORDS : HEAD_WORDS + count]
    kinds = (marks >> np.uint64(56)).astype(np.int64)
    ids = (marks >> np.uint64(_CYCLE_BITS) & np.uint64(0xFFFF)).astype(np.int64)
    cycles = (marks & np.uint64((1 << _CYCLE_BITS) - 1)).astype(np.float64)
    ns_per_cycle = (last_ns - first_ns) / (last_cycle - first_cycle)
    since = (cycles - first_cycle % (1 << _CYCLE_BITS)) % (1 << _CYCLE_BITS)
    durations = kinds == Mark.WEIGHTS
    values = np.where(durations, cycles * ns_per_cycle, first_ns - epoch_ns + since * ns_per_cycle)
    return Stream(kinds, ids, values)
