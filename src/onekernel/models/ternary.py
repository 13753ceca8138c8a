"""Ternary models: named tensors -> weights whose projections are codes and scales, one copy of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from onekernel.config import ModelConfig
from onekernel.models.load import EMBEDDING, FINAL_NORM, HEAD, Progress, Reader, read_layer
from onekernel.models.model import LayerWeights
from onekernel.models.packed import (
    PackedModel,
    allocate,
    pack_embedding,
    pack_final_norm,
    pack_head,
    pack_int8_head,
    pack_layer,
)
from onekernel.models.packed_weights import PackedWeights, PlacePacked, by_reference
from onekernel.phases.embed.reference import Table
from onekernel.phases.linear import Matrix, Weight
from onekernel.phases.ternary import Int8Rows, TernaryReference
from onekernel.weights.arena import WeightLayout
from onekernel.weights.checkpoint import Checkpoint
from onekernel.weights.ternary.checkpoint import TernaryCheckpoint
from onekernel.weights.ternary.fused import fuse
from onekernel.weights.ternary.matrix import TernaryMatrix
from onekernel.weights.ternary.verify import check_convention, check_products

FIRST_SCORES = ("self_attn.q_proj", "self_attn.k_proj", "input_layernorm")


class PlacedMatrix(Matrix, Table, Protocol):
    """A ternary matrix on its device: multiplies by itself, and finds rows where it is an embedding."""


Place = Callable[[TernaryMatrix], PlacedMatrix]
"""Turns a matrix into what multiplies by it; the matrix is dropped afterwards."""


@dataclass(frozen=True, slots=True)
class TernaryWeights:
    """The `Weights` of a ternary model; `dtype` is that of what is not ternary."""

    embedding: Table
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Weight
    dtype: torch.dtype


def load_ternary(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: str,
    progress: Progress,
    place: Place = TernaryReference,
) -> TernaryWeights:
    """Read every tensor of a ternary checkpoint to `device`; calls progress(tensors done, tensors in all).

    Raises ModelError naming any missing, extra or mis-shaped tensor before reading the first, and if the products with
    the first layer's projections are not those of the weights as their file format states them.
    """
    view = TernaryCheckpoint(checkpoint, config)
    read = Reader(view, config, dtype, device, progress)

    def matrix(names: tuple[str, ...]) -> PlacedMatrix:
        placed = place(fuse([view.ternary(name, device) for name in names]))
        read.count(len(names))
        if ".layers.0." in names[0]:
            check_products(view, names, placed.linear, device)
        return placed

    _check_scores(view, config)
    embedding: Table = matrix((EMBEDDING,)) if view.is_ternary(EMBEDDING) else read(EMBEDDING)
    layers = tuple(read_layer(read, config, index, matrix) for index in range(config.num_hidden_layers))
    final_norm = read(FINAL_NORM, torch.float32)
    head = _head(view, read, config, embedding, matrix)
    read.end()
    return TernaryWeights(embedding, layers, final_norm, head, dtype)


def load_packed_ternary(
    checkpoint: Checkpoint,
    config: ModelConfig,
    layout: WeightLayout,
    *,
    device: str,
    progress: Progress,
    place: PlacePacked = by_reference,
) -> PackedModel:
    """Read a ternary checkpoint straight into the packed form on `device`, a layer at a time.

    `place` says what multiplies by packed matrices, to compare the first layer's products with those of the weights
    as their file states them. See `load_ternary` for `progress` and errors.
    """
    view = TernaryCheckpoint(checkpoint, config)
    read = Reader(view, config, torch.bfloat16, device, progress)
    _check_scores(view, config)
    packed = allocate(config, layout, device)
    first: list[tuple[str, ...]] = []

    def matrix(names: tuple[str, ...]) -> TernaryReference:
        fused = fuse([view.ternary(name, device) for name in names])
        read.count(len(names))
        if ".layers.0." in names[0]:
            first.append(names)
        return TernaryReference(fused)

    def table(name: str) -> torch.Tensor:
        read.count(1)
        return view.read(name).to(torch.bfloat16)  # on the CPU: it is packed in parts

    pack_embedding(packed, table(EMBEDDING))
    for index in range(config.num_hidden_layers):
        pack_layer(packed, index, read_layer(read, config, index, matrix))
        if index == 0:
            layer = PackedWeights(packed, place).layers[0]
            for placed, names in zip((layer.qkv, layer.out, layer.gate_up, layer.down), first, strict=True):
                if not isinstance(placed, torch.Tensor):
                    check_products(view, names, placed.linear, device)
    pack_final_norm(packed, read(FINAL_NORM, torch.float32))
    if layout.head.form == "int8":
        pack_int8_head(packed, view.int8_head_parts(device))
    elif not layout.embed_packed:
        pack_head(packed, table(HEAD))
    read.end()
    return packed


def _check_scores(view: TernaryCheckpoint, config: ModelConfig) -> None:
    """Raise ModelError if the first layer's attention scores say that the scales were taken the wrong way round."""
    q_name, k_name, norm = (f"model.layers.0.{part}.weight" for part in FIRST_SCORES)
    if view.is_packed(q_name) and not config.qk_norm:
        check_convention(view, q_name, k_name, view.read(norm).float())


def _head(
    view: TernaryCheckpoint,
    read: Reader,
    config: ModelConfig,
    embedding: Table,
    matrix: Callable[[tuple[str, ...]], PlacedMatrix],
) -> Weight:
    if config.ternary is not None and config.ternary.head == "int8":
        return Int8Rows(*view.int8_head(read.device))
    if config.tie_word_embeddings:
        return embedding  # type: ignore[return-value]  # a tensor or a placed matrix: both are weights as well
    return matrix((HEAD,)) if view.is_ternary(HEAD) else read(HEAD)
