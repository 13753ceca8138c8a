"""The energy a GPU has used, from NVML's counter."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def energy_counter(uuid: str) -> Callable[[], float] | None:
    """Return a function that says how many millijoules the GPU of this UUID has used, or None where NVML cannot say."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, used = ctypes.c_void_p(), ctypes.c_ulonglong()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return None
    if nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(used)):
        return None

    def read() -> float:
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(used))
        return float(used.value)

    return read


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
