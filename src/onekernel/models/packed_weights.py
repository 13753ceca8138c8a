"""Packed weights as a model takes them: prefill computes with the one copy that decode reads.

One layer at a time is unpacked, into memory that all layers share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import torch

from onekernel.models.model import LayerWeights
from onekernel.models.packed import PackedModel, matrix_bytes
from onekernel.phases.linear import Matrix, Weight
from onekernel.phases.ternary import Int8Rows, TernaryReference
from onekernel.weights.arena import LAYER_MATRICES, QUANTISED_ROWS, MatrixKind, WeightLayout
from onekernel.weights.ternary.packed import PackedTernary


def scratch_bytes(layout: WeightLayout) -> int:
    """Return the bytes of one unpacked layer, and of what unpacking neurons takes on the way."""
    return sum(_sizes(layout).values()) + (matrix_bytes(layout, "gate_up") if layout.sparse else 0)


def _sizes(layout: WeightLayout) -> dict[MatrixKind, int]:
    """Bytes of a layer's unpacked matrices; ternary ones are never unpacked."""
    if layout.matrices["qkv", 0].form != "bf16":
        return {}
    return {kind: matrix_bytes(layout, kind) for kind in LAYER_MATRICES}


PlacePacked = Callable[[PackedTernary], Matrix]
"""Turns a packed ternary matrix, a view of the arenas, into what multiplies by it."""


def by_reference(packed: PackedTernary) -> Matrix:
    """Unpack a matrix and multiply by it on PyTorch."""
    return TernaryReference(packed.unpack())


@dataclass(frozen=True, slots=True)
class GateAndUp:
    """A matrix whose rows are eights of gate and of up in turn, as a model knows it: gate rows, then up rows."""

    matrix: Matrix
    inner: int

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, (tokens, 2 * inner)."""
        return self._apart(self.matrix.linear(x))

    def normed_linear(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the product with the normed x."""
        return self._apart(self.matrix.normed_linear(x, weight, eps))

    def _apart(self, rows: torch.Tensor) -> torch.Tensor:
        halves = rows.view(len(rows), -1, 2, QUANTISED_ROWS // 2).transpose(1, 2)
        return halves.reshape(len(rows), 2, -1)[:, :, : self.inner].flatten(1)


class PackedWeights:
    """The `Weights` of a packed model. Only dense layers have memory of their own; `head` is unpacked at each call.

    `place` says what multiplies by ternary matrices.
    """

    def __init__(self, packed: PackedModel, place: PlacePacked = by_reference) -> None:
        self._packed = packed
        self.embedding = PackedEmbedding(packed)
        self.layers = PackedLayers(packed, place)
        self.final_norm = packed.norm(packed.layout.constants.final_norm, packed.config.hidden_size)
        self.dtype = torch.bfloat16

    @property
    def head(self) -> Weight:
        """The head or the tied embedding, (vocab_size, hidden_size), in new memory."""
        if self._packed.layout.head.form == "int8":
            return Int8Rows(*self._packed.int8_head())
        return self._packed.matrix("head")


class PackedEmbedding:
    """Finds rows in the packed model."""

    def __init__(self, packed: PackedModel) -> None:
        self._packed = packed

    def __getitem__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of these ids, bf16 (tokens, hidden_size)."""
        return self._packed.embedding_rows(token_ids)


class PackedLayers(Sequence[LayerWeights]):
    """Layers that are unpacked when they are asked for. A layer's tensors hold until another one is asked for."""

    def __init__(self, packed: PackedModel, place: PlacePacked = by_reference) -> None:
        self._packed, self._place = packed, place
        self._scratch: torch.Tensor | None = None  # not before it is needed: prefill kernels read the packed copy
        self._index = -1
        self._layer: LayerWeights | None = None

    def __len__(self) -> int:
        return self._packed.config.num_hidden_layers

    @overload
    def __getitem__(self, index: int) -> LayerWeights: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerWeights]: ...

    def __getitem__(self, index: int | slice) -> LayerWeights | Sequence[LayerWeights]:
        """Return one layer; raises TypeError for a slice: two layers do not exist at once."""
        if isinstance(index, slice):
            raise TypeError("packed layers are unpacked one at a time; ask for one index")
        if not 0 <= index < len(self):
            raise IndexError(f"layer {index} of {len(self)}")
        if self._layer is None or self._index != index:
            self._index, self._layer = index, self._unpack(index)
        return self._layer

    def _unpack(self, layer: int) -> LayerWeights:
        packed, config, constants = self._packed, self._packed.config, self._packed.layout.constants
        parts: dict[MatrixKind, torch.Tensor] = {}
        if sizes := _sizes(packed.layout):
            if self._scratch is None:
                self._scratch = packed.arena.new_empty(sum(sizes.values()))
            parts = dict(zip(sizes, self._scratch.split(list(sizes.values())), strict=True))

        def matrix(kind: MatrixKind) -> Weight:
            if kind in parts:
                return packed.matrix(kind, layer, parts[kind])
            placed = self._place(packed.ternary(kind, layer))
            return GateAndUp(placed, config.intermediate_size) if kind == "gate_up" else placed

        def bias(kind: MatrixKind) -> torch.Tensor | None:
            found = packed.bias(kind, layer)
            return None if found is None else found.to(torch.bfloat16)

        def sub_norm(offsets: tuple[int, ...], size: int) -> torch.Tensor | None:
            return packed.norm(offsets[layer], size) if offsets else None

        def head_norm(base: int) -> torch.Tensor | None:
            return packed.norm(base + layer * config.head_dim, config.head_dim) if config.qk_norm else None

        return LayerWeights(
            attention_norm=packed.norm(constants.attention_norms[layer], config.hidden_size),
            qkv=matrix("qkv"),
            qkv_bias=bias("qkv"),
            q_norm=head_norm(constants.q_norm),
            k_norm=head_norm(constants.k_norm),
            out=matrix("out"),
            out_bias=bias("out"),
            mlp_norm=packed.norm(constants.mlp_norms[layer], config.hidden_size),
            gate_up=matrix("gate_up"),
            gate_up_bias=bias("gate_up"),
            down=matrix("down"),
            down_bias=bias("down"),
            attention_sub_norm=sub_norm(constants.attention_sub_norms, config.q_size),
            mlp_sub_norm=sub_norm(constants.mlp_sub_norms, config.intermediate_size),
        )
