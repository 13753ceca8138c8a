"""Where every matrix and every constant of a model lies on the device: from its dimensions alone, no tensor needed.

One arena of bytes holds all matrices, packed as in `weights/dense.py`, `weights/ternary/tensor_core.py` or
`weights/ternary/int8_rows.py`; one of float32 holds norms, biases, scales and RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from onekernel.config import ModelConfig
from onekernel.errors import ConfigError

MatrixKind = Literal["qkv", "out", "gate_up", "down", "gate", "head"]
"""A matrix is named after the phase that multiplies with it."""
LAYER_MATRICES: tuple[MatrixKind, ...] = ("qkv", "out", "gate_up", "down")
SPARSE_MATRICES: tuple[MatrixKind, ...] = ("qkv", "out", "gate")
"""Those of a layer whose feed-forward reads only the neurons that fire; up and down are rows of neurons there."""

UNIT_BYTES = 1024
"""The piece that a warp multiplies at once: 512 bf16 in fragment order."""
SMALL_UNIT_BYTES = 512
"""That of a quantised matrix: 16 rows of two bits or of int8."""
_UNIT_VALUES = 512
_ALIGN_BYTES = 256
_ALIGN_FLOATS = 4

Rows = Literal[4, 8]

Form = Literal["bf16", "ternary", "int8"]
"""How a matrix is packed."""
QUANTISED_ROWS = 16
"""Rows of a unit of a quantised matrix."""
_QUANTISED_COLUMNS: Mapping[Form, int] = {"ternary": 128, "int8": 32}
_INT8_PADDING = 128
"""Columns of int8 rows are padded to whole fours of units, so that few row tiles end with a ring stage."""


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class TileRows:
    """Rows of a bf16 weight unit, 8 (x 64 columns) or 4 (x 128). `out` and `down` share the residual's."""

    residual: Rows = 8
    qkv: Rows = 8
    gate_up: Rows = 8
    head: Rows = 8

    def __post_init__(self) -> None:
        for name in ("residual", "qkv", "gate_up", "head"):
            if getattr(self, name) not in get_args(Rows):
                raise ConfigError(f"the tiles of {name} have {getattr(self, name)} rows; they can have 4 or 8")

    def of(self, kind: MatrixKind) -> Rows:
        """Return the rows of one matrix's units."""
        rows: Rows = self.residual if kind in ("out", "down") else getattr(self, "gate_up" if kind == "gate" else kind)
        return rows


@dataclass(frozen=True, slots=True)
class MatrixPlace:
    """A packed matrix in the arena: row tile by row tile, the units of a row tile one after another along K.

    `rows` and `columns` are the matrix's own; row_tiles * tile_rows and k_units * tile_columns include the padding.
    """

    offset_bytes: int
    row_tiles: int
    k_units: int
    tile_rows: int
    rows: int
    columns: int
    form: Form = "bf16"

    @property
    def tile_columns(self) -> int:
        """Columns of a unit."""
        return _QUANTISED_COLUMNS.get(self.form, _UNIT_VALUES // self.tile_rows)

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit."""
        return UNIT_BYTES if self.form == "bf16" else SMALL_UNIT_BYTES

    @property
    def padded_rows(self) -> int:
        """Rows with the padding."""
        return self.row_tiles * self.tile_rows

    @property
    def padded_columns(self) -> int:
        """Columns with the padding: what a kernel needs of the inputs in shared memory."""
        return self.k_units * self.tile_columns

    @property
    def tile_bytes(self) -> int:
        """Bytes of one row tile."""
        return self.k_units * self.unit_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole matrix."""
        return self.row_tiles * self.tile_bytes


@dataclass(frozen=True, slots=True)
class NeuronPlace:
    """The neurons of a sparse feed-forward, packed as in `weights/neurons.py`, right behind the layer's gate."""

    offset_bytes: int
    places: int
    """Neurons with the padding: the rows of the packed gate."""
    width: int
    """Values of an up or a down row: as many as the gate's padded columns."""

    @property
    def neuron_bytes(self) -> int:
        """Bytes of one neuron: its up row, then its down row."""
        return 4 * self.width

    @property
    def total_bytes(self) -> int:
        """Bytes of all neurons."""
        return self.places * self.neuron_bytes


@dataclass(frozen=True, slots=True)
class ConstantsLayout:
    """Offsets in floats. Norms of the hidden size are padded with zeros to whole units, biases to whole row tiles."""

    attention_norms: tuple[int, ...]
    """One for each layer."""
    mlp_norms: tuple[int, ...]
    final_norm: int
    q_norm: int
    """(layers, head_dim); meaningless without QK-norm."""
    k_norm: int
    biases: Mapping[tuple[MatrixKind, int], int]
    """Bias of row 0 of the packed matrix, in the order of its rows; only for matrices that have one."""
    norm_floats: int
    """Floats of a norm of the hidden size, with padding."""
    rope: int
    """(context_tokens, head_dim / 2, 2): cosine and sine. It is last, so that the context moves nothing else."""
    context_tokens: int
    total_floats: int
    attention_sub_norms: tuple[int, ...] = ()
    """One for each layer of a model that has them, before the output projection."""
    mlp_sub_norms: tuple[int, ...] = ()
    """Before the down projection."""
    scales: Mapping[tuple[MatrixKind, int], int] = field(default_factory=dict)
    """Of quantised matrices: (padded rows), or (row tiles, groups, 16); those of the layers, then the head's."""
    layer_scales: int = 0
    """Floats of a layer's scales: how far a matrix's are from the next layer's, the last layer's from the head's."""


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """The two arenas of a model."""

    tile_rows: TileRows
    matrices: Mapping[tuple[MatrixKind, int], MatrixPlace]
    """By kind and layer; the head's layer is 0."""
    embed_packed: bool
    """Whether the embedding is the packed head; else it lies as (vocab_size, hidden_size) rows of bf16."""
    embedding_bytes: int
    """Offset of the embedding."""
    total_bytes: int
    constants: ConstantsLayout
    neurons: Mapping[int, NeuronPlace] = field(default_factory=dict)
    """By layer; empty if the feed-forwards are dense matrices."""

    @property
    def sparse(self) -> bool:
        """Whether the feed-forwards lie as a gate and neurons."""
        return bool(self.neurons)

    @property
    def head(self) -> MatrixPlace:
        """The head's place."""
        return self.matrices["head", 0]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of matrices that a token reads, padding included; of a sparse feed-forward only the gate."""
        return sum(place.total_bytes for place in self.matrices.values())

    @property
    def hidden_tiles(self) -> int:
        """Row tiles of the residual."""
        return self.matrices["out", 0].row_tiles

    @property
    def hidden_rows(self) -> int:
        """Rows of the residual, padding included."""
        return self.matrices["out", 0].padded_rows


def weight_layout(
    config: ModelConfig, tile_rows: TileRows, *, context_tokens: int, sparse: bool = False
) -> WeightLayout:
    """Lay out a model's arenas; the feed-forward's inner size is padded to 4, since values travel in fours.

    `sparse`: up and down as rows of neurons, for phases that read only those that fire.
    """
    matrices: dict[tuple[MatrixKind, int], MatrixPlace] = {}
    neurons: dict[int, NeuronPlace] = {}
    end = 0
    for layer in range(config.num_hidden_layers):
        for kind in SPARSE_MATRICES if sparse else LAYER_MATRICES:
            matrices[kind, layer] = place = _place(config, kind, tile_rows, end)
            end = round_up(end + place.total_bytes, _ALIGN_BYTES)
        if sparse:
            gate = matrices["gate", layer]
            neurons[layer] = NeuronPlace(end, gate.padded_rows, gate.padded_columns)
            end = round_up(end + neurons[layer].total_bytes, _ALIGN_BYTES)
    matrices["head", 0] = head = _place(config, "head", tile_rows, end)
    end = round_up(end + head.total_bytes, _ALIGN_BYTES)
    embedding = head.offset_bytes
    embed_packed = config.tie_word_embeddings and head.form == "bf16"
    if not embed_packed:
        embedding = end
        end = round_up(end + 2 * config.vocab_size * config.hidden_size, _ALIGN_BYTES)
    constants = _constants(config, matrices, context_tokens)
    return WeightLayout(tile_rows, matrices, embed_packed, embedding, end, constants, neurons)


def _shape(config: ModelConfig, kind: MatrixKind) -> tuple[int, int]:
    hidden = config.hidden_size
    return {
        "qkv": (config.q_size + 2 * config.kv_size, hidden),
        "out": (hidden, config.q_size),
        "gate_up": (2 * config.intermediate_size, hidden),
        "down": (hidden, config.intermediate_size),
        "gate": (config.intermediate_size, hidden),
        "head": (config.vocab_size, hidden),
    }[kind]


def _place(config: ModelConfig, kind: MatrixKind, tile_rows_of: TileRows, offset: int) -> MatrixPlace:
    rows, columns = _shape(config, kind)
    padded = 2 * round_up(config.intermediate_size, 4) if kind == "gate_up" else rows
    form = form_of(config, kind)
    if form != "bf16":
        whole = round_up(columns, _INT8_PADDING if form == "int8" else _QUANTISED_COLUMNS[form])
        k_units, tiles = whole // _QUANTISED_COLUMNS[form], -(-padded // QUANTISED_ROWS)
        return MatrixPlace(offset, tiles, k_units, QUANTISED_ROWS, rows, columns, form)
    tile_rows = tile_rows_of.of(kind)
    k_units = -(-columns * tile_rows // _UNIT_VALUES)
    return MatrixPlace(offset, -(-padded // tile_rows), k_units, tile_rows, rows, columns)


def form_of(config: ModelConfig, kind: MatrixKind) -> Form:
    """Return how a model's matrix is packed."""
    if config.ternary is None:
        return "bf16"
    if kind != "head":
        return "ternary"
    heads: dict[str, Form] = {"dense": "bf16", "ternary": "ternary", "int8": "int8"}
    return heads[config.ternary.head]


def _constants(
    config: ModelConfig, matrices: Mapping[tuple[MatrixKind, int], MatrixPlace], context_tokens: int
) -> ConstantsLayout:
    end = 0

    def take(floats: int) -> int:
        nonlocal end
        start = end
        end = round_up(end + floats, _ALIGN_FLOATS)
        return start

    layers = range(config.num_hidden_layers)
    with_bias = {"qkv": config.qkv_bias, "out": config.o_bias, "gate_up": config.mlp_bias, "down": config.mlp_bias}
    normed: tuple[MatrixKind, ...] = ("qkv", "gate_up", "gate", "head")
    norm_floats = max(matrices[kind, 0].padded_columns for kind in normed if (kind, 0) in matrices)
    attention_norms = tuple(take(norm_floats) for _ in layers)
    mlp_norms = tuple(take(norm_floats) for _ in layers)
    final_norm = take(norm_floats)
    heads = config.num_hidden_layers * config.head_dim if config.qk_norm else 0
    q_norm, k_norm = take(heads), take(heads)
    biases = {key: take(place.padded_rows) for key, place in matrices.items() if with_bias.get(key[0], False)}
    sub_layers = layers if config.sub_norms else range(0)
    attention_sub_norms = tuple(take(config.q_size) for _ in sub_layers)
    mlp_sub_norms = tuple(take(config.intermediate_size) for _ in sub_layers)
    sizes = {
        key: place.padded_rows * scales_of_row(config, place) for key, place in matrices.items() if place.form != "bf16"
    }
    scales = {key: take(floats) for key, floats in sizes.items()}
    layer_scales = sum(sizes.get((kind, 0), 0) for kind in LAYER_MATRICES)
    rope = take(context_tokens * config.head_dim)
    return ConstantsLayout(
        attention_norms,
        mlp_norms,
        final_norm,
        q_norm,
        k_norm,
        biases,
        norm_floats,
        rope,
        context_tokens,
        end,
        attention_sub_norms,
        mlp_sub_norms,
        scales,
        layer_scales,
    )


def scales_of_row(config: ModelConfig, place: MatrixPlace) -> int:
    """Return how many scales a row of a quantised matrix has: one, or one for each group of its padded columns."""
    group = config.ternary.group if config.ternary is not None and place.form == "ternary" else None
    return 1 if group is None else place.padded_columns // group
