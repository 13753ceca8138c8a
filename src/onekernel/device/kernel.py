"""What can launch a kernel: the GPU (`cuda_kernel.py`) or the CPU shim, through one interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from onekernel.device.spec import KernelSpec

Arg = torch.Tensor | int | float | bytes


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


class Bound(Protocol):
    """A launch whose arguments were checked when it was prepared."""

    def launch(self, grid: int, *numbers: float) -> None:
        """Start `grid` CTAs on torch's current stream with new values of the numbers that change, in their order.

        On a GPU torch's current device must be the kernel's: a few microseconds are all that a launch may cost.
        """
        ...


class BindableKernel(Kernel, Protocol):
    """A kernel whose launches can be prepared."""

    def bind(self, block: int, args: Sequence[Arg], *, shared_bytes: int = 0, changing: Sequence[str] = ()) -> Bound:
        """Prepare launches with these arguments, checked now; `changing` names the numbers that each launch gives."""
        ...
