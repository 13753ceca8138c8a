"""The energy counter through a library that is not there."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from onekernel.errors import DeviceError
from onekernel.measure.energy import energy_counter


class Nvml:
    """pynvml with one GPU."""

    class NVMLError(Exception):
        pass

    def __init__(self, known: str = "GPU-1") -> None:
        self.known, self.millijoules = known, 5000

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self.known:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int:
        return self.millijoules


def test_it_reads_millijoules_of_the_gpu_with_this_uuid() -> None:
    nvml = Nvml()
    read = energy_counter("cuda:0", "GPU-1", nvml)
    before = read()
    nvml.millijoules += 250
    assert read() - before == 250.0


def test_what_has_no_counter_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match="the device is cpu: leave out --energy"):
        energy_counter("cpu", "")
    with pytest.raises(DeviceError, match="energy of cuda:0 cannot be read: Not Found"):
        energy_counter("cuda:0", "GPU-2", Nvml())
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(DeviceError, match="pip install nvidia-ml-py"):
        energy_counter("cuda:0", "GPU-1")
