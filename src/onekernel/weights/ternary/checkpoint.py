"""A checkpoint of a ternary model seen as matrices: one set of names and shapes, whatever the files hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch

from onekernel.config import ModelConfig, Ternary
from onekernel.errors import ModelError
from onekernel.weights.architectures.bitnet_b158 import SUB_NORMS
from onekernel.weights.architectures.ternary import scale_convention
from onekernel.weights.checkpoint import Checkpoint, CheckpointSettings, TensorInfo
from onekernel.weights.layout import expected_tensors
from onekernel.weights.ternary import hf_packed, oracle
from onekernel.weights.ternary.absmean import quantise
from onekernel.weights.ternary.fused import by_group
from onekernel.weights.ternary.int8_rows import quantise_rows
from onekernel.weights.ternary.matrix import GROUPS, TernaryMatrix
from onekernel.weights.ternary.scales import check_scales

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SCALE = ".weight_scale"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_PACKED, _INT8 = "U8", "I8"
_PART_ROWS = 1024
"""Rows of a head that are made int8 at once."""
_FLOATS = ("BF16", "F16", "F32")


@runtime_checkable
class PackedBytes(Protocol):
    """A checkpoint with tensors of whole bytes, which are no weights until somebody takes them apart."""

    def read_bytes(self, name: str) -> torch.Tensor:
        """Return a uint8 or int8 tensor as it is stored."""
        ...


@runtime_checkable
class TernaryBlocks(Protocol):
    """A checkpoint that takes its own packed types apart."""

    def holds_ternary(self, name: str) -> bool:
        """Whether a tensor is stored in a ternary type."""
        ...

    def ternary(self, name: str) -> TernaryMatrix:
        """Return such a tensor on the CPU."""
        ...

    def oracle_rows(self, name: str, rows: Sequence[int]) -> oracle.Rows:
        """Return rows of such a tensor in float64, found without the code of `ternary`."""
        ...


class TernaryCheckpoint:
    """The `Checkpoint` of a ternary model: packed projections have the shape that they stand for, scales are hidden.

    Sub-norms have transformers' BitNet names. `read` returns what is dense, `ternary` and `int8_head` the rest.
    """

    def __init__(self, stored: Checkpoint, config: ModelConfig) -> None:
        """Raises ModelError if packed weights lack their scales, or nothing says what the scales mean."""
        self.settings: CheckpointSettings = stored.settings
        self._stored, self._tied = stored, config.tie_word_embeddings
        self._ternary = config.ternary or Ternary()
        found, expected = stored.tensors, expected_tensors(config)
        self._names = {_canonical(name): name for name in found}
        self._types = {name: found[own].stored_type for name, own in self._names.items()}
        self._tensors = {
            name: self._logical(name, found[own], expected)
            for name, own in self._names.items()
            if not name.endswith(SCALE)
        }
        packed = [name for name in self._tensors if self._types[name] == _PACKED]
        if any(self._scale_name(name) not in self._names for name in packed):
            raise ModelError(f"{self.settings.source} has packed ternary weights without weight_scale: fetch it again")
        if packed and "quantization_config" not in self.settings.config:
            raise ModelError(
                f"{self.settings.source} has packed ternary weights but its config.json no quantization_config, which "
                "says whether to multiply by weight_scale or to divide; fetch config.json again"
            )
        self.convention = scale_convention(self.settings.config) if packed else "multiply"

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor but the scales, with the shape of the matrix that it stands for."""
        return self._tensors

    def is_ternary(self, name: str) -> bool:
        """Whether a tensor of this name is a ternary matrix in this model."""
        if name in (EMBEDDING, HEAD):
            return self._ternary.head == "ternary"
        return name.endswith(tuple(f".{part}.weight" for part in PROJECTIONS))

    def is_packed(self, name: str) -> bool:
        """Whether a tensor is packed as Hugging Face packs, with scales of the config's convention."""
        return self._types[name] == _PACKED

    def read(self, name: str) -> torch.Tensor:
        """Return a dense tensor on the CPU."""
        return self._stored.read(self._names[name])

    def ternary(self, name: str, device: str = "cpu") -> TernaryMatrix:
        """Return a projection on `device`, with group scales if the config has groups.

        Master weights are quantised there, packed ones taken apart. Raises ModelError for a file with group scales
        where the config has none, or of a type that is neither.
        """
        matrix = self._matrix(name, device)
        group = self._ternary.group
        if group is None and matrix.group is not None:
            raise ModelError(
                f"{name} of {self.settings.source} has a scale for each {matrix.group} columns and other matrices have "
                "one scale; such a mixture is not built in"
            )
        return matrix if group is None else by_group(matrix, group)

    def oracle_rows(self, name: str, rows: Sequence[int]) -> oracle.Rows:
        """Return rows of a projection, (len(rows), K) float64, by its format's definition; see `oracle`."""
        own, kind = self._names[name], self._types[name]
        if isinstance(self._stored, TernaryBlocks) and self._stored.holds_ternary(own):
            return self._stored.oracle_rows(own, rows)
        if kind in _FLOATS:
            return oracle.master_rows(self._stored.read(own), rows, self._ternary.group)
        scales: oracle.Rows = self._stored.read(self._names[self._scale_name(name)]).to(torch.float64).numpy()
        codes = oracle.hf_packed_rows(self._bytes(name), rows, self._tensors[name].shape[0])
        scales = scales[list(rows)].repeat(codes.shape[1] // scales.shape[1], axis=1) if scales.size > 1 else scales
        return codes / scales if self.convention == "divide" else codes * scales

    def int8_head(self, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """Return the head as int8: values (vocab_size, hidden_size) and a scale for each row, float32.

        Where the files have a dense one, or the embedding for it, that is quantised on `device`.
        """
        parts = list(self.int8_head_parts(device))
        return torch.cat([values for values, _ in parts]), torch.cat([scales for _, scales in parts])

    def int8_head_parts(self, device: str = "cpu") -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the same some rows at a time, a multiple of 16: in float32 the head would be the largest of all."""
        if self._types.get(HEAD) == _INT8:
            scales = self._stored.read(self._names[self._scale_name(HEAD)]).to(device, torch.float32)
            stated, rows = f"{self._scale_name(HEAD)} of {self.settings.source}", self._tensors[HEAD].shape[0]
            if tuple(scales.shape) != (rows,):
                raise ModelError(f"{stated} has shape {tuple(scales.shape)}; it must be ({rows},): fetch it again")
            check_scales(scales, stated)
            for values, own in zip(self._bytes(HEAD).split(_PART_ROWS), scales.split(_PART_ROWS), strict=True):
                yield values.to(device), own
            return
        for part in self.read(EMBEDDING if self._tied else HEAD).split(_PART_ROWS):
            yield quantise_rows(part.to(device))

    def close(self) -> None:
        """Close the files."""
        self._stored.close()

    def _matrix(self, name: str, device: str) -> TernaryMatrix:
        own, kind = self._names[name], self._types[name]
        if isinstance(self._stored, TernaryBlocks) and self._stored.holds_ternary(own):
            found = self._stored.ternary(own)
            return replace(found, codes=found.codes.to(device), scales=found.scales.to(device))
        if kind == _PACKED:
            return self._packed(name, device)
        if kind in _FLOATS:
            matrix = quantise(self._stored.read(own).to(device), self._ternary.group)
            check_scales(matrix.scales, f"{name} of {self.settings.source}")
            return matrix
        raise ModelError(
            f"{name} of {self.settings.source} is stored as {kind}, which is no ternary form: fetch another"
        )

    def _packed(self, name: str, device: str) -> TernaryMatrix:
        codes = hf_packed.unpack(self._bytes(name).to(device), self._tensors[name].shape[0], name)
        stated = f"{self._scale_name(name)} of {self.settings.source}"
        scales = self._stored.read(self._names[self._scale_name(name)]).to(device, torch.float32)
        check_scales(scales, stated)
        scales = 1 / scales if self.convention == "divide" else scales
        check_scales(scales, f"1 / {stated}")  # as a reciprocal may overflow
        if scales.numel() == 1:
            return TernaryMatrix(codes, scales.view(1))
        return TernaryMatrix(codes, scales.contiguous(), group=_group(codes, scales, stated))

    def _bytes(self, name: str) -> torch.Tensor:
        if not isinstance(self._stored, PackedBytes):
            raise ModelError(f"{self.settings.source} cannot hold packed bytes, but {name} is stored as such")
        return self._stored.read_bytes(self._names[name])

    def _scale_name(self, name: str) -> str:
        return name.removesuffix(".weight") + SCALE

    def _logical(self, name: str, info: TensorInfo, expected: Mapping[str, tuple[int, ...]]) -> TensorInfo:
        want = expected.get(name)
        if (
            info.stored_type == _PACKED
            and want is not None
            and info.shape == (hf_packed.packed_rows(want[0]), *want[1:])
        ):
            return replace(info, shape=want)
        return info


def _group(codes: torch.Tensor, scales: torch.Tensor, name: str) -> int:
    """Return how many columns each of several scales is for."""
    rows, columns = codes.shape
    allowed = [(rows, columns // group) for group in GROUPS if columns % group == 0]
    if tuple(scales.shape) not in allowed:
        raise ModelError(
            f"{name} has shape {tuple(scales.shape)}; a {rows} x {columns} matrix has one scale"
            f"{''.join(f' or {shape}' for shape in allowed)}: fetch it or convert the model again"
        )
    return columns // scales.shape[1]


def _canonical(name: str) -> str:
    """Return transformers' name of a tensor that early BitNet models call otherwise."""
    for theirs, ours in SUB_NORMS.items():
        if theirs in name:
            return name.replace(theirs, ours)
    return name
