"""What a GPU is and can do, read from the driver without creating a context."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from onekernel.device.driver import check, driver
from onekernel.errors import ConfigError, DeviceError


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One GPU as the process sees it: under MIG or CUDA_VISIBLE_DEVICES that is a slice, or one of several."""

    index: int
    name: str
    uuid: str
    capability: tuple[int, int]
    sm_count: int
    shared_bytes_per_block: int
    """What one CTA may have, after opting in."""
    shared_bytes_per_sm: int
    l2_bytes: int
    memory_bytes: int
    driver_version: str
    """The driver's own version, such as 580.82.07, or "unknown"."""
    cuda_version: tuple[int, int]
    """The newest CUDA that the driver runs."""
    exec_timeout: bool
    """KERNEL_EXEC_TIMEOUT: a display watchdog ends kernels that run for seconds."""
    mig: bool
    cooperative: bool
    clusters: bool
    prohibited: bool
    """Its compute mode lets no process in."""

    @property
    def sm(self) -> str:
        """The capability as compilers write it, such as sm_90."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


def device_index(device: str) -> int:
    """Return N of "cuda:N", and 0 for "cuda"; raises ConfigError for anything else."""
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match is None:
        raise ConfigError(f"device is {device!r}; it must be auto, cpu, cuda or cuda:N")
    return int(match[1] or 0)


def facts(device: str = "cuda", cuda: Any = None) -> DeviceFacts:
    """Return the facts of "cuda" or "cuda:N"; raises DeviceError if there is no driver or no such GPU."""
    index = device_index(device)
    cuda = cuda or driver()
    count = check(cuda.cuDeviceGetCount(), "counting GPUs", cuda)
    if index >= count:
        raise DeviceError(f"{device} does not exist: this process sees {count} GPU(s), cuda:0 to cuda:{count - 1}")
    handle = check(cuda.cuDeviceGet(index), f"opening {device}", cuda)

    def attribute(name: str) -> int:
        member = getattr(cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(cuda.cuDeviceGetAttribute(member, handle), f"reading {name} of {device}", cuda))

    # The driver ends the name with a zero byte; what fills the rest of the buffer is undefined.
    raw = check(cuda.cuDeviceGetName(256, handle), f"reading the name of {device}", cuda)
    name = raw.partition(b"\0")[0].decode()
    version = int(check(cuda.cuDriverGetVersion(), "reading the driver's version", cuda))
    mig = "MIG" in name.split()
    uuid = UUID(bytes=bytes(check(cuda.cuDeviceGetUuid(handle), f"reading the UUID of {device}", cuda).bytes))
    return DeviceFacts(
        index=index,
        name=name,
        uuid=f"{'MIG' if mig else 'GPU'}-{uuid}",
        capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        sm_count=attribute("MULTIPROCESSOR_COUNT"),
        shared_bytes_per_block=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        shared_bytes_per_sm=attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        l2_bytes=attribute("L2_CACHE_SIZE"),
        memory_bytes=int(check(cuda.cuDeviceTotalMem(handle), f"reading the memory of {device}", cuda)),
        driver_version=driver_version(),
        cuda_version=(version // 1000, version % 1000 // 10),
        exec_timeout=bool(attribute("KERNEL_EXEC_TIMEOUT")),
        mig=mig,
        cooperative=bool(attribute("COOPERATIVE_LAUNCH")),
        clusters=bool(attribute("CLUSTER_LAUNCH")),
        prohibited=attribute("COMPUTE_MODE") == int(cuda.CUcomputemode.CU_COMPUTEMODE_PROHIBITED),
    )


def driver_version(proc: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the version of the kernel module, such as "580.82.07", or "unknown" where the file is not there."""
    try:
        match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", proc.read_text())
    except OSError:
        match = None
    return match[1] if match else "unknown"
