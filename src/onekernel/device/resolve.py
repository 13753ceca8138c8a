"""Turn --device into the device to run on, with the reason for the choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onekernel.device.facts import DeviceFacts, device_index, facts
from onekernel.device.support import check_supported
from onekernel.errors import DeviceError


@dataclass(frozen=True, slots=True)
class ResolvedDevice:
    """A torch device string ("cpu", "cuda:0") and why it was taken, as one line for the user."""

    device: str
    reason: str


def resolve_device(asked: str, read: Callable[[str], DeviceFacts] = facts) -> ResolvedDevice:
    """Return where to run "auto", "cpu", "cuda" or "cuda:N".

    "auto" takes the first GPU if this package's kernels run on it, else the CPU, and says why. A GPU asked for by name
    only has to work with torch: `check_supported` decides about the kernels. Raises DeviceError if it does not, and
    ConfigError for another word.
    """
    if asked == "cpu":
        return ResolvedDevice("cpu", "asked for")
    if asked == "auto":
        try:
            found = _usable("cuda:0", read)
            check_supported(found)
        except DeviceError as error:
            return ResolvedDevice("cpu", f"{_without_advice(error)}; running on the CPU")
        return ResolvedDevice("cuda:0", _line(found))
    device = f"cuda:{device_index(asked)}"
    return ResolvedDevice(device, _line(_usable(device, read)))


def _usable(device: str, read: Callable[[str], DeviceFacts]) -> DeviceFacts:
    found = read(device)
    import torch

    if torch.version.cuda is None:
        raise DeviceError(f"torch {torch.__version__} is built without CUDA; install a CUDA build or use --device cpu")
    built_for = int(torch.version.cuda.split(".")[0])
    if found.cuda_version[0] < built_for:
        raise DeviceError(
            f"torch {torch.__version__} needs a driver for CUDA {built_for}, driver {found.driver_version} runs CUDA "
            f"{found.cuda_version[0]}.{found.cuda_version[1]}; update the driver or use --device cpu"
        )
    return found


def _line(found: DeviceFacts) -> str:
    return f"{found.name}, {found.sm}, {found.sm_count} SMs, {found.memory_bytes / 2**30:.0f} GiB"


def _without_advice(error: DeviceError) -> str:
    return str(error).split(";")[0]
