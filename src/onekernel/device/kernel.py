"""What can launch a kernel: the GPU (`cuda_kernel.py`) or the CPU shim, through one interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from onekernel.device.spec import KernelSpec

Arg = torch.Tensor | int | float


class Kernel(Protocol):
    """One compiled entry, ready to launch."""

    @property
    def spec(self) -> KernelSpec:
        """What it was compiled from; `spec.params` is what `launch` checks its arguments against."""
        ...

    def launch(
        self,
        grid: int,
        block: int,
        args: Sequence[Arg],
        *,
        shared_bytes: int = 0,
        cluster: int = 1,
        cooperative: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Start `grid` CTAs of `block` threads with `shared_bytes` of dynamic shared memory, in clusters of `cluster`.

        `cooperative` demands that all CTAs are resident at once. `stream` is torch's current one by default; the call
        does not wait for the kernel. Raises DeviceError if an argument does not fit `spec.params` or the device cannot
        hold the launch.
        """
        ...
