"""A GGUF file as a `Checkpoint`: block types are expanded to bf16 one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from onekernel.errors import ModelError
from onekernel.weights.checkpoint import CheckpointSettings, TensorInfo, TokenizerFiles
from onekernel.weights.gguf_header import BlockType, GgufHeader, GgufTensor, read_header
from onekernel.weights.gguf_names import PERMUTED, generation_config, hf_config, tensor_name
from onekernel.weights.gguf_rope import TENSOR as ROPE_TENSOR
from onekernel.weights.gguf_rope import llama3_scaling
from onekernel.weights.ternary import oracle
from onekernel.weights.ternary.gguf_blocks import KINDS, decode
from onekernel.weights.ternary.matrix import TernaryMatrix

_PLAIN = {"F32": ("<f4", torch.float32), "F16": ("<f2", torch.float16), "BF16": ("<i2", torch.bfloat16)}
"""Types that are copied: NumPy's dtype in the file (it has no bf16; int16 has the same bits) and PyTorch's."""

_FIRST_PROJECTION = "model.layers.0.self_attn.q_proj.weight"

_CHUNK_VALUES = 1 << 24
"""Values expanded at once: the float32 on the way take 64 MiB, whatever the matrix."""


class GgufCheckpoint:
    """The `Checkpoint` of a GGUF file. `metadata` has its keys as plain Python values."""

    def __init__(self, path: Path) -> None:
        """Map the file and read its head.

        Raises ModelError if it is cut or damaged, UnsupportedModelError for an architecture or type that is not read.
        """
        self._path = path
        self._map = _map(path)
        try:
            header = read_header(self._map, str(path))
            self.metadata: dict[str, Any] = header.metadata
            config = hf_config(header.metadata, header.tensors, str(path))
            if ROPE_TENSOR in header.tensors:
                divisors = self._values(header.tensors[ROPE_TENSOR]).to(torch.float32)
                config["rope_scaling"] = llama3_scaling(divisors, config, str(path))
        except ModelError:
            self.close()
            raise
        self._stored = {tensor_name(name): t for name, t in header.tensors.items() if name != ROPE_TENSOR}
        self._heads = _permuted_heads(header.metadata, config)
        if quantization := config.get("quantization_config"):
            quantization["group_size"] = self.ternary(_FIRST_PROJECTION).group
        self.settings = CheckpointSettings(
            name=path.stem,
            source=str(path),
            config=config,
            generation_config=generation_config(header.metadata, str(path)),
            tokenizer=TokenizerFiles(gguf_metadata=header.metadata),
            notes=_expansion(path, header),
        )

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor in the file by its Hugging Face name."""
        return {name: TensorInfo(t.shape, t.type.name, t.bytes) for name, t in self._stored.items()}

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU: F32, F16 and BF16 as they are, block types as bf16, q and k rows unpermuted."""
        values = self._values(self._stored[name])
        heads = self._heads_of(name)
        return _unpermute(values, heads) if heads else values

    def holds_ternary(self, name: str) -> bool:
        """Whether a tensor is of a ternary block type."""
        return self._stored[name].type.name in KINDS

    def ternary(self, name: str) -> TernaryMatrix:
        """Return a tensor of a ternary block type on the CPU, q and k rows unpermuted; nothing is lost."""
        tensor = self._stored[name]
        data = np.frombuffer(self._map, np.uint8, tensor.bytes, tensor.start)
        matrix = decode(tensor.type.name, data, (tensor.shape[0], tensor.shape[1]), f"{name} in {self._path}")
        heads = self._heads_of(name)
        if not heads:
            return matrix
        scales = matrix.scales if matrix.group is None else _unpermute(matrix.scales, heads)
        return replace(matrix, codes=_unpermute(matrix.codes, heads), scales=scales)

    def oracle_rows(self, name: str, rows: Sequence[int]) -> oracle.Rows:
        """Return rows of a tensor of a ternary block type in float64, without the code that `ternary` reads it with."""
        tensor = self._stored[name]
        data = np.frombuffer(self._map, np.uint8, tensor.bytes, tensor.start)
        if heads := self._heads_of(name):
            rows = [oracle.interleaved_row(row, tensor.shape[0] // heads) for row in rows]
        kind, (count, columns) = tensor.type, tensor.shape
        if kind.name == "I2_S":
            return oracle.i2_s_rows(data, rows, (count, columns))
        if kind.name.startswith("Q2_0"):
            return oracle.q2_0_rows(data, rows, columns, kind.elements)
        return self._dequantised(kind, data.reshape(count, -1)[list(rows)]).astype(np.float64)

    def _heads_of(self, name: str) -> int:
        """Return the heads whose rows the converter permuted, 0 if it did not."""
        return next((count for part, count in self._heads.items() if part in name), 0)

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()

    def _values(self, tensor: GgufTensor) -> torch.Tensor:
        if tensor.type.name in _PLAIN:
            stored, dtype = _PLAIN[tensor.type.name]
            flat = np.frombuffer(self._map, np.dtype(stored), math.prod(tensor.shape), tensor.start)
            return torch.from_numpy(flat.copy()).view(dtype).view(tensor.shape)
        blocks = np.frombuffer(self._map, np.uint8, tensor.bytes, tensor.start)
        blocks = blocks.reshape(-1, tensor.shape[-1] // tensor.type.elements * tensor.type.bytes)
        values = torch.empty((len(blocks), tensor.shape[-1]), dtype=torch.bfloat16)
        step = max(1, _CHUNK_VALUES // tensor.shape[-1])
        for row in range(0, len(blocks), step):
            chunk = self._dequantised(tensor.type, blocks[row : row + step])
            values[row : row + step] = torch.from_numpy(chunk)
        return values.view(tensor.shape)

    @staticmethod
    def _dequantised(kind: BlockType, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        from gguf.constants import GGMLQuantizationType  # late: half a second
        from gguf.quants import dequantize

        values: npt.NDArray[np.float32] = dequantize(blocks, GGMLQuantizationType[kind.name])
        return values


def _map(path: Path) -> mmap:
    try:
        with path.open("rb") as file:
            return mmap(file.fileno(), 0, access=ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelError(f"{path} cannot be read ({error}); fetch it again") from error


def _permuted_heads(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, int]:
    """Return part of a tensor's name -> heads, for the tensors whose rows the converter permuted."""
    if metadata["general.architecture"] not in PERMUTED:
        return {}
    return {".q_proj.": config["num_attention_heads"], ".k_proj.": config["num_key_value_heads"]}


def _unpermute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the converter's interleaving of the two halves of each head: (rows,) or (rows, columns)."""
    tail = rows.shape[1:]
    return rows.view(heads, -1, 2, *tail).transpose(1, 2).reshape(rows.shape)


def _expansion(path: Path, header: GgufHeader) -> tuple[str, ...]:
    """Say what expanding the block types costs, if there are any."""
    blocks = sorted({t.type.name for t in header.tensors.values() if t.type.elements > 1 and t.type.name not in KINDS})
    if not blocks:
        return ()
    expanded = sum(t.bytes if t.type.name in KINDS else 2 * math.prod(t.shape) for t in header.tensors.values())
    return (
        f"{path.name} ({', '.join(blocks)}): {path.stat().st_size / 1e6:.1f} MB in the file become "
        f"{expanded / 1e6:.1f} MB, because the blocks are expanded to bf16; every token reads the expanded weights",
    )
