"""What a model on disk looks like to the rest: settings and named tensors, whatever the file format.

`open_checkpoint` (in `weights/open.py`) turns a directory, a GGUF file or a hub id into one of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor: shape as PyTorch has it (rows first), the stored type's name, bytes in the file."""

    shape: tuple[int, ...]
    stored_type: str
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Where the tokenizer comes from: a directory with tokenizer.json, or the metadata of a GGUF file."""

    directory: Path | None = None
    gguf_metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """The parsed settings beside the tensors. `config` has config.json's keys (synthesised for a GGUF)."""

    name: str
    source: str
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tokenizer: TokenizerFiles
    notes: tuple[str, ...] = field(default=())
    """Sentences for the user, such as what expanding a GGUF costs."""


class Checkpoint(Protocol):
    """Named tensors of one model. Names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`, ...)."""

    settings: CheckpointSettings

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor in the files, by Hugging Face name."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU: bf16, fp16 or fp32 as stored, GGUF block types dequantised to bf16.

        Raises ModelError naming the file if the bytes cannot be read.
        """
        ...

    def close(self) -> None:
        """Close the files."""
        ...


def read_all(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor once, in the file's order."""
    for name in checkpoint.tensors:
        yield name, checkpoint.read(name)
