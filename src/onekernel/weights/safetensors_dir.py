"""Weights in safetensors: one file, or shards and their index. Memory-mapped; headers are validated on opening."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from onekernel.errors import ModelError, UnsupportedModelError
from onekernel.weights.checkpoint import CheckpointSettings, TensorInfo
from onekernel.weights.directory import INDEX, WEIGHTS, file_names, index_shards, refuse_without_safetensors

_READABLE = (torch.bfloat16, torch.float16, torch.float32)
_BYTES = (torch.uint8, torch.int8)


class SafetensorsCheckpoint:
    """The `Checkpoint` of a Hugging Face directory."""

    def __init__(self, directory: Path, settings: CheckpointSettings) -> None:
        """Open every file and read its header.

        Raises ModelError naming the file that is missing, cut or damaged, UnsupportedModelError for pickled weights.
        """
        self.settings = settings
        self._files: dict[Path, Any] = {}
        self._placed: dict[str, Path] = {}
        self._tensors: dict[str, TensorInfo] = {}
        names = file_names(directory)
        placed = index_shards(directory) if INDEX in names else {}
        if not placed and WEIGHTS not in names:
            refuse_without_safetensors(names, settings.source)
        shards = sorted(set(placed.values())) or [WEIGHTS]
        if lacking := [shard for shard in shards if shard not in names]:
            raise ModelError(f"{directory} lacks {', '.join(lacking)}, listed in {INDEX}; fetch the model again")
        for shard in shards:
            self._open(directory / shard)
        for name, shard in placed.items():
            if self._placed.get(name) != directory / shard:
                raise ModelError(f"{directory / shard} lacks {name}, listed in {INDEX}; fetch both files again")

    def _open(self, path: Path) -> None:
        try:
            file: Any = safe_open(path, framework="pt")
            self._files[path] = file
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if name in self._tensors:
                    raise ModelError(f"{name} is in both {self._placed[name]} and {path}; fetch the model again")
                stored = file.get_slice(name)
                self._tensors[name] = _info(tuple(stored.get_shape()), stored.get_dtype())
                self._placed[name] = path
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{path} is not a whole safetensors file ({error}); it was cut or damaged: fetch it again"
            ) from error

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor in the files."""
        return self._tensors

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU as it is stored: bf16, fp16 or fp32."""
        return self._read(name, _READABLE)

    def read_bytes(self, name: str) -> torch.Tensor:
        """Return a tensor of packed weights on the CPU, uint8 or int8."""
        return self._read(name, _BYTES)

    def _read(self, name: str, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
        path = self._placed[name]
        try:
            tensor: torch.Tensor = self._files[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{name} cannot be read from {path} ({error}); fetch the file again") from error
        if tensor.dtype not in dtypes:
            raise UnsupportedModelError(
                f"{name} in {path} is stored as {self._tensors[name].stored_type}, which is not built in; use the "
                "original bf16, fp16 or fp32 weights, or a GGUF of this model"
            )
        return tensor

    def close(self) -> None:
        """Unmap the files."""
        self._files.clear()


def _info(shape: tuple[int, ...], stored_type: str) -> TensorInfo:
    bits = int("".join(filter(str.isdigit, stored_type.split("_")[0])) or 8)  # BF16, F8_E4M3, I32, BOOL
    return TensorInfo(shape, stored_type, math.prod(shape) * bits // 8)
