"""The state of a run in one safetensors file: weights, AdamW's moments, and how far it is. No pickle.

Written beside the old one, flushed, then renamed over it, so that there is a whole checkpoint at every moment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from onekernel.errors import TrainingError
from onekernel.train.model import SparseLlama
from onekernel.train.routes import HOT, restore_routes, route_tensors

_KEY = "onekernel.run"
_WEIGHT, _MEAN, _SQUARE = "weight", "exp_avg", "exp_avg_sq"
_NAMED_AT_MOST = 3


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: optimiser steps and tokens done, and the settings that must not change."""

    step: int
    tokens: int
    fixed: dict[str, Any]


def whole(tensor: Tensor) -> Tensor:
    """Return a parameter or moment on the CPU, gathered from all processes if it is sharded: all must call."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu()


def save_checkpoint(
    path: Path, model: SparseLlama, optimizer: torch.optim.Optimizer, progress: Progress, *, write: bool
) -> None:
    """Gather everything and, where `write`, put it in `path`. Every process calls it, one writes.

    Raises TrainingError if the disk is full or fails; the file that was there stays.
    """
    tensors = route_tensors(model)
    for kind, name, tensor in _state(model, optimizer):
        full = whole(tensor)
        if write:
            tensors[f"{kind}:{name}"] = full.contiguous()
    if write:
        write_tensors(path, tensors, {_KEY: json.dumps(asdict(progress))}, "checkpoint")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str], what: str) -> None:
    """Write a safetensors file aside and rename it; raises TrainingError if that fails, and leaves no part."""
    part = path.with_name(path.name + ".part")
    try:
        save_file(dict(tensors), part, metadata=dict(about))
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        before = "; the one before is whole" if path.exists() else ""
        raise TrainingError(
            f"the {what} of {size / 1e6:.0f} MB cannot be written to {path} ({error}){before}: make room, then resume"
        ) from error


def read_progress(path: Path) -> Progress:
    """Return how far the run of a checkpoint is; raises TrainingError if it is damaged."""
    with _opened(path) as file:
        try:
            return Progress(**json.loads(file.metadata()[_KEY]))
        except (KeyError, TypeError, ValueError) as error:
            raise TrainingError(f"{path} is no checkpoint of a run ({error!r}); start anew elsewhere") from error


def load_checkpoint(path: Path, model: SparseLlama, optimizer: torch.optim.AdamW) -> Progress:
    """Fill the model and the optimizer; raises TrainingError, before anything is changed, if the shapes differ."""
    progress = read_progress(path)
    with _opened(path) as file:
        _check(path, file, model)
        for name, parameter in model.named_parameters():

            def read(kind: str, like: Tensor = parameter, name: str = name) -> Tensor:
                return _placed(file.get_tensor(f"{kind}:{name}"), like)

            with torch.no_grad():
                parameter.copy_(read(_WEIGHT))
            if f"{_MEAN}:{name}" in file.keys():  # noqa: SIM118  (not a mapping)
                optimizer.state[parameter] = {
                    "step": torch.tensor(float(progress.step)),
                    "exp_avg": read(_MEAN),
                    "exp_avg_sq": read(_SQUARE),
                }
        hot = {key: file.get_tensor(key) for key in file.keys() if key.startswith(HOT)}  # noqa: SIM118
        restore_routes(model, hot, model.rope.device)
    return progress


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield _WEIGHT, name, parameter
        state = optimizer.state.get(parameter, {})
        for kind in (_MEAN, _SQUARE):
            if kind in state:
                yield kind, name, state[kind]


def _placed(full: Tensor, like: Tensor) -> Tensor:
    """Return a tensor where `like` is, and sharded like it."""
    if isinstance(like, DTensor):
        return distribute_tensor(full.to(like.device), like.device_mesh, like.placements)
    return full.to(like.device)


def _check(path: Path, file: Any, model: nn.Module) -> None:
    stored = {
        name.partition(":")[2]: tuple(file.get_slice(name).get_shape())
        for name in file.keys()  # noqa: SIM118  (not a mapping)
        if name.startswith(f"{_WEIGHT}:")
    }
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if faults := [
        f"{name} is {stored.get(name, 'missing')} there and {wanted.get(name, 'no part')} here"
        for name in sorted(stored.keys() | wanted.keys())
        if stored.get(name) != wanted.get(name)
    ]:
        more = f"; and {len(faults) - _NAMED_AT_MOST} more" if len(faults) > _NAMED_AT_MOST else ""
        raise TrainingError(
            f"{path} is of a model of another shape: {'; '.join(faults[:_NAMED_AT_MOST])}{more}; "
            "give the settings it was trained with, or another run.directory"
        )


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"{path} is not a whole checkpoint ({error}); start anew in another folder") from error
