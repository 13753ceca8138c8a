"""The processes of a run: one, or those that torchrun started; where each computes, and how they share a model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onekernel.errors import ConfigError, DeviceError
from onekernel.train.model import SparseLlama
from onekernel.train.settings import RunSettings

_PATIENCE = timedelta(hours=2)
"""How long processes wait for the first one, which tokenizes the text."""


@dataclass(frozen=True, slots=True)
class World:
    """This process among all."""

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and speaks."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over all processes."""
        if self.size > 1:
            dist.all_reduce(values)
            values /= self.size
        return values

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over all processes."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest over all processes."""
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which products are computed in the run's dtype."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32)

    def shared(self, model: SparseLlama, settings: RunSettings) -> nn.Module:
        """Return the model as all processes train it: itself, DDP around it, or sharded in place by FSDP2."""
        if settings.compile:
            for layer in model.layers:
                layer.compile()
        if self.size == 1:
            return model
        if settings.parallel == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(self.device.type, (self.size,))
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            return model
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, [self.device] if self.device.type == "cuda" else None)


@contextlib.contextmanager
def open_world(settings: RunSettings) -> Iterator[World]:
    """Join the processes that torchrun started, if it did. Raises ConfigError for a batch that they cannot share."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if settings.batch % size:
        raise ConfigError(f"run.batch is {settings.batch}, not a multiple of the {size} processes")
    part = settings.batch // size
    if part % (settings.micro_batch or part):
        raise ConfigError(
            f"each of {size} processes has {part} pieces of a batch, not a multiple of run.micro_batch, "
            f"{settings.micro_batch}"
        )
    device = _device(settings.device, int(os.environ.get("LOCAL_RANK", "0")))
    world = World(rank, size, device, _dtype(settings.dtype, device))
    with _repeatable(device.type == "cuda" and settings.deterministic):
        if size == 1:
            yield world
            return
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
        try:
            yield world
        finally:
            dist.destroy_process_group()


@contextlib.contextmanager
def _repeatable(wanted: bool) -> Iterator[None]:
    """Let PyTorch choose algorithms that give the same bits every time, where it has one; a CPU always does."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts; it asks for this
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False  # our kernels write all they allocate
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled


def _device(name: str, local_rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise ConfigError(f"run.device is {name!r}; it must be auto, cpu, cuda or cuda:N")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(f"run.device is {name}, and there is no NVIDIA GPU that PyTorch can use; set it to cpu")
    device = torch.device("cuda", int(number) if number else local_rank)
    torch.cuda.set_device(device)
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32
