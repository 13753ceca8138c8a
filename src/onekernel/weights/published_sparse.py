"""The files of a published activation-sparse model, under the names and in the order that a Llama's have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

import torch

from onekernel.errors import ModelError
from onekernel.weights.checkpoint import Checkpoint, CheckpointSettings, TensorInfo


class Layout(Enum):
    """How a stored matrix lies beside nn.Linear's (outputs, inputs). A square one does not show it; its name does."""

    AS_LINEAR = "as nn.Linear"
    TRANSPOSED = "transposed"


_MATRICES = {
    # The training code's own parameters.
    "mlp.gate_weight": ("mlp.gate_proj.weight", Layout.TRANSPOSED),
    "mlp.up_weight": ("mlp.up_proj.weight", Layout.AS_LINEAR),
    "mlp.down_weight": ("mlp.down_proj.weight", Layout.TRANSPOSED),
    # What its kernels take.
    "mlp.GATE": ("mlp.gate_proj.weight", Layout.AS_LINEAR),
    "mlp.UP": ("mlp.up_proj.weight", Layout.AS_LINEAR),
    "mlp.DOWN": ("mlp.down_proj.weight", Layout.TRANSPOSED),
}
"""End of a stored name -> Hugging Face's, and the layout. Hugging Face's own names are stored as nn.Linear has them."""

_NO_WEIGHTS = ("tracker.", "metrics_accumulator.")
"""Beginnings of parts of a name that hold the training's statistics."""


@dataclass(frozen=True, slots=True)
class _Stored:
    name: str
    layout: Layout


class PublishedSparseCheckpoint:
    """The `Checkpoint` of a published sparse model, over one that reads its files."""

    def __init__(self, files: Checkpoint) -> None:
        """Raises ModelError if two stored tensors stand for the same weight."""
        self.settings: CheckpointSettings = replace(
            files.settings,
            notes=(*files.settings.notes, "trained with ReLU, whatever hidden_act in its config.json says"),
        )
        self._files = files
        self._stored: dict[str, _Stored] = {}
        for name in files.tensors:
            if name.startswith(_NO_WEIGHTS) or any(f".{part}" in name for part in _NO_WEIGHTS):
                continue
            stands_for, layout = _stands_for(name)
            if (other := self._stored.get(stands_for)) is not None:
                source = files.settings.source
                raise ModelError(f"{source} stores {stands_for} twice, as {other.name} and {name}; keep one of them")
            self._stored[stands_for] = _Stored(name, layout)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every weight, by Hugging Face's name and shape."""
        return {name: self._info(stored) for name, stored in self._stored.items()}

    def read(self, name: str) -> torch.Tensor:
        """Return one weight on the CPU, as nn.Linear has it."""
        stored = self._stored[name]
        tensor = self._files.read(stored.name)
        return tensor.t().contiguous() if stored.layout is Layout.TRANSPOSED else tensor

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _info(self, stored: _Stored) -> TensorInfo:
        info = self._files.tensors[stored.name]
        return replace(info, shape=info.shape[::-1]) if stored.layout is Layout.TRANSPOSED else info


def _stands_for(name: str) -> tuple[str, Layout]:
    for end, (stands_for, layout) in _MATRICES.items():
        if name.endswith(f".{end}"):
            return name.removesuffix(end) + stands_for, layout
    return name, Layout.AS_LINEAR
