"""The energy of calls, where the GPU's counter can be read."""

from __future__ import annotations

from collections.abc import Callable

from onekernel.errors import DeviceError
from onekernel.measure.energy import energy_counter


def counter_if_any(device: str, uuid: str) -> Callable[[], float] | None:
    """Return `energy_counter` of a GPU, or None where there is none to read."""
    try:
        return energy_counter(device, uuid)
    except DeviceError:
        return None


def millijoules_per_call(counter: Callable[[], float] | None, run: Callable[[], object], calls: int) -> float | None:
    """Return the energy of one of `calls` calls; `run` must have finished on the device when it returns.

    The counter moves every 20 to 100 ms: give calls that take half a second and more together.
    """
    if counter is None:
        return None
    before = counter()
    for _ in range(calls):
        run()
    return (counter() - before) / calls
