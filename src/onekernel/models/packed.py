"""A model's weights as the kernels read them: two arenas, filled matrix by matrix, and the way back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from onekernel.config import ModelConfig
from onekernel.models.model import LayerWeights, Weights
from onekernel.phases.attention.rope import rope_table
from onekernel.phases.linear import Weight
from onekernel.phases.ternary import Int8Rows, TernaryReference
from onekernel.weights.arena import QUANTISED_ROWS, MatrixKind, MatrixPlace, WeightLayout, round_up, scales_of_row
from onekernel.weights.dense import PackedDense
from onekernel.weights.neurons import PackedNeurons, places_of
from onekernel.weights.ternary.int8_rows import pack_rows, unpack_rows
from onekernel.weights.ternary.matrix import TernaryMatrix
from onekernel.weights.ternary.tensor_core import TensorCoreTiles

_PART_TILES = 1024
"""Row tiles of the head that are packed at once."""


@dataclass(frozen=True, slots=True)
class PackedModel:
    """All weights of a model. `arena` is bytes, `constants` float32; both lie as `layout` says, on one device."""

    config: ModelConfig
    layout: WeightLayout
    arena: torch.Tensor
    constants: torch.Tensor

    def matrix(self, kind: MatrixKind, layer: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy of one matrix, bf16 (rows, columns); gate_up's gate rows come before its up rows.

        `out`, if given, is bytes for it, at least `matrix_bytes` says; nothing else is allocated. The rows of the
        result lie as far apart as the padded columns. Of a sparse layout gate_up and down are put together from the
        gate and the neurons, with as much again on the way, and down is a transposed view.
        """
        if self.layout.sparse and kind in ("gate_up", "down"):
            return self._from_neurons(kind, layer, out)
        place = self.layout.matrices[kind, layer]
        out = self.arena.new_empty(place.total_bytes) if out is None else out[: place.total_bytes]
        matrix = out.view(torch.bfloat16).view(place.padded_rows, place.padded_columns)
        packed = PackedDense(tiles_of(self.arena, place), place.rows, place.columns, place.tile_rows).by_rows()
        # A tile of gate_up holds as many gate rows as up rows; these overwrite the padding that ends the gate rows.
        parts = packed.unflatten(1, (2, -1)).unbind(1) if kind == "gate_up" else (packed,)
        for number, part in enumerate(parts):
            first = number * (place.rows // len(parts))
            rows = matrix[first : first + part.shape[0] * part.shape[1]].view(part.shape)
            # Eight values as one element of 16 bytes: an eighth of the addresses to compute.
            rows.view(torch.complex128).copy_(part.view(torch.complex128))
        return matrix[: place.rows, : place.columns]

    def ternary(self, kind: MatrixKind, layer: int = 0) -> TensorCoreTiles:
        """Return one ternary matrix as its operators take it, a view of both arenas: decode and prefill share a copy.

        gate_up's rows come in eights, of gate and of up in turn, with its padding.
        """
        place, config = self.layout.matrices[kind, layer], self.config
        group = None if config.ternary is None else config.ternary.group
        codes = self.arena[place.offset_bytes : place.offset_bytes + place.total_bytes].view(place.row_tiles, -1)
        rows: tuple[int, ...] = (place.rows,)
        if kind == "qkv":
            rows = (config.q_size, config.kv_size, config.kv_size)
        if kind == "gate_up":
            rows = (QUANTISED_ROWS // 2,) * (2 * place.row_tiles)
        scales = self.scales(kind, layer)
        if group is not None:
            return TensorCoreTiles(
                codes, scales.view(place.row_tiles, -1, QUANTISED_ROWS), (sum(rows), place.columns), (), group
            )
        return TensorCoreTiles(codes, scales, (sum(rows), place.columns), rows, None)

    def scales(self, kind: MatrixKind, layer: int) -> torch.Tensor:
        """Return a quantised matrix's scales, a flat view of the constants; see `ConstantsLayout`."""
        place, start = self.layout.matrices[kind, layer], self.layout.constants.scales[kind, layer]
        return self.constants[start : start + place.padded_rows * scales_of_row(self.config, place)]

    def int8_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a copy of an int8 head: values (vocab_size, hidden_size) and scales (vocab_size,)."""
        place = self.layout.head
        tiles = self.arena[place.offset_bytes : place.offset_bytes + place.total_bytes]
        return unpack_rows(tiles, place.rows, place.columns), self.scales("head", 0)[: place.rows]

    def neurons(self, layer: int) -> PackedNeurons:
        """Return the neurons of a layer of a sparse layout, a view of the arena."""
        place, config = self.layout.neurons[layer], self.config
        part = self.arena[place.offset_bytes : place.offset_bytes + place.total_bytes].view(torch.bfloat16)
        return PackedNeurons(part.view(place.places, 2, place.width), config.intermediate_size, config.hidden_size)

    def _from_neurons(self, kind: MatrixKind, layer: int, out: torch.Tensor | None) -> torch.Tensor:
        size, inner = matrix_bytes(self.layout, kind), self.config.intermediate_size
        out = self.arena.new_empty(size) if out is None else out[:size]
        matrix, neurons = out.view(torch.bfloat16).view(-1, self.config.hidden_size), self.neurons(layer)
        if kind == "down":
            return matrix.copy_(neurons.down()).t()
        place = self.layout.matrices["gate", layer]
        packed = PackedDense(tiles_of(self.arena, place), place.rows, place.columns, place.tile_rows).by_rows()
        at = places_of(inner, place.padded_rows).to(self.arena.device)
        gate = packed[at // place.tile_rows, at % place.tile_rows].reshape(inner, -1)
        matrix[:inner].copy_(gate[:, : self.config.hidden_size])
        matrix[inner:].copy_(neurons.up())
        return matrix

    def bias(self, kind: MatrixKind, layer: int) -> torch.Tensor | None:
        """Return a matrix's bias, float32 (rows), in the order of the rows of `matrix`; None if it has none."""
        offset = self.layout.constants.biases.get((kind, layer))
        if offset is None:
            return None
        place = self.layout.matrices[kind, layer]
        bias = self.constants[offset : offset + place.padded_rows]
        if kind != "gate_up":
            return bias[: place.rows]
        halves = bias.view(place.row_tiles, 2, place.tile_rows // 2).transpose(0, 1)
        return halves.reshape(2, -1)[:, : self.config.intermediate_size].flatten()

    def embedding_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the embedding, bf16 (tokens, hidden_size), without unpacking the rest."""
        hidden = self.config.hidden_size
        if not self.layout.embed_packed:
            return self.embedding[token_ids]
        rows = self.layout.head.tile_rows
        tiles = tiles_of(self.arena, self.layout.head)[token_ids // rows]
        unpacked = PackedDense(tiles, len(token_ids) * rows, hidden, rows).unpack()
        return unpacked[torch.arange(len(token_ids), device=token_ids.device) * rows + token_ids % rows]

    def norm(self, offset: int, size: int) -> torch.Tensor:
        """Return norm weights, float32 (size,), from their offset in the constants."""
        return self.constants[offset : offset + size]

    @property
    def rope(self) -> torch.Tensor:
        """The RoPE table as `rope_table` makes it: (2, context_tokens, head_dim / 2), a view of the constants."""
        constants = self.layout.constants
        table = self.constants[constants.rope : constants.rope + constants.context_tokens * self.config.head_dim]
        return table.view(constants.context_tokens, -1, 2).permute(2, 0, 1)

    @property
    def embedding(self) -> torch.Tensor:
        """An untied embedding, (vocab_size, hidden_size), a view of the arena."""
        start, values = self.layout.embedding_bytes, self.config.vocab_size * self.config.hidden_size
        return self.arena[start : start + 2 * values].view(torch.bfloat16).view(-1, self.config.hidden_size)

    def write_rope(self, table: torch.Tensor) -> None:
        """Overwrite the first rows of the RoPE table with `rope_table`'s (2, tokens, head_dim / 2), on any device."""
        self.rope[:, : table.shape[1]].copy_(table)


def matrix_bytes(layout: WeightLayout, kind: MatrixKind) -> int:
    """Return the bytes that one unpacked matrix takes, whatever the layer."""
    if not layout.sparse or kind not in ("gate_up", "down"):
        return layout.matrices[kind, 0].total_bytes
    gate = layout.matrices["gate", 0]
    return 2 * gate.rows * gate.columns * (2 if kind == "gate_up" else 1)


def tiles_of(arena: torch.Tensor, place: MatrixPlace) -> torch.Tensor:
    """Return a matrix's part of the arena as bf16 (row_tiles, k_units, 512)."""
    part = arena[place.offset_bytes : place.offset_bytes + place.total_bytes]
    return part.view(torch.bfloat16).view(place.row_tiles, place.k_units, -1)


def allocate(config: ModelConfig, layout: WeightLayout, device: torch.device | str) -> PackedModel:
    """Reserve both arenas: bytes not initialised, constants zero but for the RoPE table."""
    arena = torch.empty(layout.total_bytes, dtype=torch.uint8, device=device)
    constants = torch.zeros(layout.constants.total_floats, dtype=torch.float32, device=device)
    packed = PackedModel(config, layout, arena, constants)
    packed.write_rope(rope_table(config, layout.constants.context_tokens))
    return packed


def pack(model: Weights, config: ModelConfig, layout: WeightLayout) -> PackedModel:
    """Pack a model's weights on their device, rounded to bf16. At most one matrix exists twice at a time."""
    packed = allocate(config, layout, model.final_norm.device)
    for layer, weights in enumerate(model.layers):
        pack_layer(packed, layer, weights)
    if not isinstance(model.embedding, torch.Tensor):
        raise TypeError(f"only a dense embedding is packed here, not {type(model.embedding).__name__}")
    pack_embedding(packed, model.embedding)
    if not layout.embed_packed:
        pack_weight(packed, "head", 0, model.head)
    pack_final_norm(packed, model.final_norm)
    return packed


def pack_embedding(packed: PackedModel, embedding: torch.Tensor) -> None:
    """Pack the embedding (vocab_size, hidden_size), which is also the head if they are tied."""
    if packed.layout.embed_packed:
        pack_head(packed, embedding)
    else:
        packed.embedding.copy_(embedding)


def pack_head(packed: PackedModel, head: torch.Tensor) -> None:
    """Pack a dense head, on any device, part by part: no second copy of the largest matrix is on the model's device."""
    place, tiles = packed.layout.head, tiles_of(packed.arena, packed.layout.head)
    parts = zip(head.split(_PART_TILES * place.tile_rows), tiles.split(_PART_TILES), strict=True)
    for rows, part in parts:
        PackedDense.pack(rows.to(packed.arena.device), place.tile_rows, part)


def pack_final_norm(packed: PackedModel, norm: torch.Tensor) -> None:
    """Keep the weights of the norm before the head."""
    _copy_floats(packed, packed.layout.constants.final_norm, norm)


def pack_layer(packed: PackedModel, layer: int, weights: LayerWeights) -> None:
    """Pack one layer's matrices, norms and biases."""
    constants = packed.layout.constants
    _copy_floats(packed, constants.attention_norms[layer], weights.attention_norm)
    _copy_floats(packed, constants.mlp_norms[layer], weights.mlp_norm)
    for base, norm in ((constants.q_norm, weights.q_norm), (constants.k_norm, weights.k_norm)):
        if norm is not None:
            _copy_floats(packed, base + layer * packed.config.head_dim, norm)
    for offsets, sub_norm in (
        (constants.attention_sub_norms, weights.attention_sub_norm),
        (constants.mlp_sub_norms, weights.mlp_sub_norm),
    ):
        if sub_norm is not None:
            _copy_floats(packed, offsets[layer], sub_norm)
    if packed.layout.sparse:
        _pack_neurons(packed, layer, weights)
    for kind, matrix, bias in _matrices(weights):
        if (kind, layer) not in packed.layout.matrices:
            continue  # among the neurons, and without biases
        pack_weight(packed, kind, layer, matrix)
        if bias is not None:
            rows = _interleaved(packed, layer, bias) if kind == "gate_up" else bias
            _copy_floats(packed, constants.biases[kind, layer], rows)


def pack_weight(packed: PackedModel, kind: MatrixKind, layer: int, weight: Weight) -> None:
    """Pack a matrix into its place, whichever its form."""
    if isinstance(weight, TernaryReference):
        pack_ternary(packed, kind, layer, weight.matrix)
    elif isinstance(weight, Int8Rows):
        pack_int8_head(packed, [(weight.values, weight.scales)])
    elif isinstance(weight, torch.Tensor):
        pack_matrix(packed, kind, layer, weight)
    else:
        raise TypeError(f"there is no packed form of {type(weight).__name__}")


def pack_int8_head(packed: PackedModel, parts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Pack an int8 head from values and scales of some rows at a time, all but the last a multiple of 16."""
    place, row = packed.layout.head, 0
    for values, scales in parts:
        start = place.offset_bytes + row // QUANTISED_ROWS * place.tile_bytes
        size = -(-len(values) // QUANTISED_ROWS) * place.tile_bytes
        pack_rows(values, packed.arena[start : start + size])
        _copy_floats(packed, packed.layout.constants.scales["head", 0] + row, scales)
        row += len(values)


def pack_ternary(packed: PackedModel, kind: MatrixKind, layer: int, matrix: TernaryMatrix) -> None:
    """Pack codes and scales into their places; gate_up with gate rows before up rows."""
    if kind == "gate_up":
        by_row = matrix.row_scales() if matrix.group is None else matrix.scales
        codes, scales = _interleaved(packed, layer, matrix.codes), _interleaved(packed, layer, by_row)
        rows = (1,) * len(codes) if matrix.group is None else ()
        matrix = TernaryMatrix(codes, scales, rows, matrix.group)
    tiles, place = TensorCoreTiles.pack(matrix), packed.ternary(kind, layer)
    place.codes.copy_(tiles.codes)
    place.scales.copy_(tiles.scales)


def pack_matrix(packed: PackedModel, kind: MatrixKind, layer: int, matrix: torch.Tensor) -> None:
    """Pack one (rows, columns) matrix into its place; gate_up with gate rows before up rows."""
    place = packed.layout.matrices[kind, layer]
    rows = _interleaved(packed, layer, matrix) if kind == "gate_up" else matrix
    PackedDense.pack(rows, place.tile_rows, tiles_of(packed.arena, place))


def _pack_neurons(packed: PackedModel, layer: int, weights: LayerWeights) -> None:
    """Pack a layer's feed-forward as a gate, whose rows lie as the neurons do, and neurons."""
    gate, up = _dense(weights.gate_up).chunk(2)
    place = packed.layout.matrices["gate", layer]
    rows = gate.new_zeros(place.padded_rows, gate.shape[1])
    rows[places_of(len(gate), len(rows)).to(gate.device)] = gate
    pack_matrix(packed, "gate", layer, rows)
    packed.neurons(layer).pack(up, _dense(weights.down))


def _matrices(weights: LayerWeights) -> Iterator[tuple[MatrixKind, Weight, torch.Tensor | None]]:
    yield "qkv", weights.qkv, weights.qkv_bias
    yield "out", weights.out, weights.out_bias
    yield "gate_up", weights.gate_up, weights.gate_up_bias
    yield "down", weights.down, weights.down_bias


def _dense(weight: Weight) -> torch.Tensor:
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"only dense matrices are packed here, not {type(weight).__name__}")
    return weight


def _interleaved(packed: PackedModel, layer: int, rows: torch.Tensor) -> torch.Tensor:
    """Order gate and up rows, (2 * intermediate_size, ...), so that a tile holds half a tile of each."""
    place = packed.layout.matrices["gate_up", layer]
    half = place.tile_rows // 2
    halves = rows.view(2, -1, *rows.shape[1:])
    missing = round_up(halves.shape[1], half) - halves.shape[1]
    if missing:
        halves = torch.cat((halves, halves.new_zeros(2, missing, *rows.shape[1:])), dim=1)
    return halves.reshape(2, -1, half, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)


def _copy_floats(packed: PackedModel, offset: int, values: torch.Tensor) -> None:
    packed.constants[offset : offset + values.numel()].copy_(values)
