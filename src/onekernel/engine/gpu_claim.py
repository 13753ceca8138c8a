"""One process at a time on a GPU: a lock file named by the GPU's UUID, which the system lets go when its owner ends."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

from onekernel.env import cache_dir, get
from onekernel.errors import DeviceError

_log = logging.getLogger(__name__)

_MPS_FOLDER = "/tmp/nvidia-mps"
"""Where NVIDIA's Multi-Process Service puts its pipes unless CUDA_MPS_PIPE_DIRECTORY says otherwise."""


class GpuClaim:
    """A process's claim to a GPU, until `close`. Engines of one process may share it."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        """Let the GPU go. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def claim_gpu(uuid: str, *, folder: Path | None = None, mps: bool | None = None) -> GpuClaim:
    """Claim the GPU with this UUID for the megakernel.

    If another process of this user has it, warn with its pid: the GPU then runs one kernel at a time and changes
    between them, which is slow but right. Under MPS it would run both at once, on too few SMs for either, and each
    would wait for ever: DeviceError. `folder` and `mps` are found if not given.
    """
    path = (folder or cache_dir()) / "gpus" / f"{uuid}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        _log.info("no lock file for %s (%s): other processes on it are not seen", uuid, error)
        return GpuClaim(None)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        if owner != str(os.getpid()):
            _share(uuid, owner, mps_runs() if mps is None else mps)
        return GpuClaim(None)
    except OSError as error:  # a file system without locks
        _log.info("%s cannot be locked (%s): other processes on %s are not seen", path, error, uuid)
        os.close(descriptor)
        return GpuClaim(None)
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return GpuClaim(descriptor)


def mps_runs() -> bool:
    """Return whether a Multi-Process Service has its pipes where CUDA would look for them."""
    return (Path(get("CUDA_MPS_PIPE_DIRECTORY") or _MPS_FOLDER) / "control").exists()


def _share(uuid: str, owner: str, mps: bool) -> None:
    if mps:
        raise DeviceError(
            f"process {owner} runs the megakernel on {uuid} under NVIDIA's Multi-Process Service (MPS), where two of "
            f"them would wait for each other for ever: end process {owner}, stop MPS (`echo quit | "
            f"nvidia-cuda-mps-control`), take another GPU with --device, or use --backend reference"
        )
    _log.warning(
        "process %s uses %s too: both will be slow, because the GPU runs one of the two kernels at a time", owner, uuid
    )
