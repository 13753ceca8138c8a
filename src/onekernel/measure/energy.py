"""The energy that a GPU has taken, from the driver's own counter (NVML)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from onekernel.errors import DeviceError


def energy_counter(device: str, uuid: str, nvml: Any = None) -> Callable[[], float]:
    """Return a function that reads the energy of "cuda:N", whose UUID is given, in millijoules.

    It counts since the driver was loaded and is renewed some ten times a second, so only differences over a second or
    more mean something. `nvml`: pynvml's functions, found if not given. Raises DeviceError if there is no counter.
    """
    if not device.startswith("cuda"):
        raise DeviceError(
            f"energy is read from an NVIDIA GPU's counter, and the device is {device}: leave out --energy"
        )
    if nvml is None:
        try:
            nvml = import_module("pynvml")
        except ImportError as error:
            raise DeviceError("energy is read by nvidia-ml-py, which is missing: pip install nvidia-ml-py") from error
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError as error:
        raise DeviceError(f"the energy of {device} cannot be read: {error}") from error
    return lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
