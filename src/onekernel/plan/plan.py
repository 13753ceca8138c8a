"""A decode step as data: which phases there are, what each CTA does in each, and where values and weights lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onekernel.config import ModelConfig
from onekernel.errors import ConfigError, DenseOnlyError
from onekernel.phases.attention import task as attention
from onekernel.phases.choose import task as choose
from onekernel.phases.combine import task as combine
from onekernel.phases.down import task as down
from onekernel.phases.embed import task as embed
from onekernel.phases.frame import Frame, Ints, Records, Words
from onekernel.phases.gate import task as gate
from onekernel.phases.gate_up import task as gate_up
from onekernel.phases.gather import task as gather
from onekernel.phases.head import task as head
from onekernel.phases.out import task as out
from onekernel.phases.qkv import task as qkv
from onekernel.plan.abi import CHOICE_CTA_WORDS, CHOICE_FIXED_WORDS, HEADER, TASK, Flag, Kind
from onekernel.plan.chunks import block_pages_after, members_of, piece_tokens
from onekernel.plan.layout import (
    LAYER_MATRICES,
    SMALL_UNIT_BYTES,
    UNIT_BYTES,
    MatrixKind,
    TileRowsChoice,
    WeightLayout,
    choose_layout,
    round_up,
    scales_of_row,
)
from onekernel.plan.limits import Limits
from onekernel.plan.partition import Partition, Strategy, make_partition
from onekernel.plan.shared import QuantisedSizes, SharedLayout, quantised_run, shared_layout

LAYER_KINDS = (Kind.QKV, Kind.ATTENTION, Kind.COMBINE, Kind.OUT, Kind.GATE_UP, Kind.DOWN)
SPARSE_LAYER_KINDS = (Kind.QKV, Kind.ATTENTION, Kind.COMBINE, Kind.OUT, Kind.GATE, Kind.GATHER)
PRODUCTS = (Kind.QKV, Kind.OUT, Kind.GATE_UP, Kind.DOWN, Kind.GATE, Kind.HEAD)
_MATRIX_OF: Mapping[Kind, MatrixKind] = {
    Kind.QKV: "qkv",
    Kind.OUT: "out",
    Kind.GATE_UP: "gate_up",
    Kind.DOWN: "down",
    Kind.HEAD: "head",
}
_INT8_RUN = 8
"""Row tiles of an int8 head whose sums are finished at once, if so few end with a ring stage."""
ASSUMED_ACTIVE_FRACTION = 0.05
"""Of a sparse feed-forward's neurons, those that are taken to fire where nothing is known; only balance and predictions
depend on it."""
_ALIGN_WORDS = 16  # a cache line of 128 bytes


@dataclass(frozen=True, slots=True)
class PhaseInfo:
    """A phase of a token; `layer` is 0 where there is none."""

    kind: Kind
    layer: int
    index: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """A part of the exchange: `words` words for each sequence, one sequence after another from `word` on."""

    name: str
    word: int
    words: int


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """All that the megakernel is told of a model on a machine, besides the weights. `make_plan` makes it."""

    config: ModelConfig
    limits: Limits
    layout: WeightLayout
    header: npt.NDArray[np.void]
    """One record, shape ()."""
    tasks: npt.NDArray[np.void]
    """(ctas, phases)."""
    buffers: tuple[Buffer, ...]
    phases: tuple[PhaseInfo, ...]
    shared: SharedLayout
    active_fraction: float | None = None
    """Of a sparse feed-forward's neurons, those that are assumed to fire; None: the feed-forwards are dense."""

    @property
    def exchange_words(self) -> int:
        """Words of 8 bytes of the whole exchange, cleared before each launch."""
        return sum(_room(buffer, self.limits.sequences) for buffer in self.buffers)

    @property
    def choice_words(self) -> int:
        """Words of 8 bytes in which all CTAs choose a token of one sequence, where that takes rounds."""
        return CHOICE_FIXED_WORDS + self.limits.ctas * CHOICE_CTA_WORDS

    @property
    def choice_bytes(self) -> int:
        """Bytes on the device of choosing: counts, bias, scores, mask and words of every sequence."""
        return self.limits.sequences * (
            12 * self.config.vocab_size + self.config.vocab_size // 8 + 8 * self.choice_words
        )

    @property
    def members(self) -> int:
        """CTAs that share a KV head."""
        return int(self.header["members"])

    def block_pages_after(self, prompt_tokens: int) -> int:
        """Return the pages of a block of the cache for an answer to so many tokens; see `chunks`."""
        piece = piece_tokens(self.config.head_dim, self.limits.stage_bytes)
        return block_pages_after(prompt_tokens, piece, self.members)

    @property
    def bytes_per_phase(self) -> npt.NDArray[np.int64]:
        """Bytes of matrices that each CTA reads in each phase of a token, (ctas, phases).

        Neurons of sparse feed-forwards count as far as they are assumed to fire.
        """
        read: Ints = self.tasks["count"].astype(np.int64) * self.tasks["k_units"] * unit_bytes(self.tasks["flags"])
        for phase in self.phases:
            if phase.kind == Kind.GATE:
                place, neurons = self.layout.matrices["gate", phase.layer], self.layout.neurons[phase.layer]
                fire = self.tasks["count"][:, phase.index] * place.tile_rows * (self.active_fraction or 0.0)
                read[:, phase.index] += (fire * neurons.neuron_bytes).astype(np.int64)
        return read

    @property
    def bytes_per_token(self) -> int:
        """Bytes of matrices that all CTAs read per token."""
        return int(self.bytes_per_phase.sum())

    @property
    def imbalance(self) -> float:
        """Bytes per token of the most loaded CTA over the mean."""
        per_cta = self.bytes_per_phase.sum(axis=1)
        return float(per_cta.max() / per_cta.mean())

    @property
    def hand_overs(self) -> int:
        """Phases of a token that wait for values of other CTAs; combine has work only with a long context."""
        return sum(phase.kind not in (Kind.EMBED, Kind.COMBINE) for phase in self.phases)


def make_plan(
    config: ModelConfig,
    limits: Limits,
    *,
    tile_rows: TileRowsChoice = "auto",
    partition: Strategy = "balanced",
    order: Sequence[int] = (),
    vocab_limit: int | None = None,
    active_fraction: float | None = None,
) -> Plan:
    """Plan a model on a machine.

    Token ids from `vocab_limit` on (None: vocab_size) are never chosen. `order` and `partition` give other plans with
    the same results. With an `active_fraction` the feed-forwards read only the neurons that fire, and CTAs are balanced
    for so many of them; None: they are dense. Raises ConfigError if the model's shape or the shared memory does not
    allow one.
    """
    if active_fraction is not None:
        _check_sparse(config, limits, active_fraction)
    if config.ternary is not None and config.ternary.head == "ternary":
        raise ConfigError(
            "the model's embedding and head are ternary and the megakernel reads those in bf16 or the head as int8; "
            "the reference backend runs such models, on a GPU through operators"
        )
    if config.ternary is None and config.sub_norms:
        raise ConfigError(
            "the model has sub-norms and dense weights; the megakernel has sub-norms for ternary ones only: use the "
            "reference"
        )
    if config.ternary is not None and limits.sequences > 1:
        raise ConfigError(f"{limits.sequences} sequences of a ternary model; the megakernel makes one at a time")
    if config.head_dim % 4:
        raise ConfigError(f"head_dim is {config.head_dim}; the megakernel takes values in fours: use the reference")
    vocab_limit = config.vocab_size if vocab_limit is None else vocab_limit
    if not 0 < vocab_limit <= config.vocab_size:
        raise ConfigError(f"vocab_limit is {vocab_limit}; it must be from 1 to vocab_size, {config.vocab_size}")

    fraction = active_fraction or 0.0

    def slowest(layout: WeightLayout) -> float:
        shares = make_partition(config, layout, limits.ctas, active_fraction=fraction)
        return float(shares.bytes_per_cta(layout, fraction).max() * limits.ctas)

    layout = choose_layout(config, tile_rows, limits.max_context, slowest, active_fraction)
    shares = make_partition(config, layout, limits.ctas, partition, order, fraction)
    if any(key[0] == "gate" and share.count.min() < 1 for key, share in shares.products.items()):
        raise DenseOnlyError(
            f"{config.intermediate_size} neurons in tiles of {layout.tile_rows.gate_up} are too few for {limits.ctas} "
            "CTAs, each of which must have some"
        )
    phases = _phases(config, LAYER_KINDS if active_fraction is None else SPARSE_LAYER_KINDS)
    buffers = _buffers(config, limits, layout)
    words = Words(**{buffer.name: buffer.word for buffer in buffers})
    frame = Frame(config, layout, words, len(phases))
    tasks = np.zeros((limits.ctas, len(phases)), TASK.dtype)
    for phase in phases:
        records = tasks[:, phase.index]
        _fill(records, frame, phase, shares)
        records["kind"], records["layer"] = phase.kind, phase.layer
    shared = plan_shared(config, limits, layout, tasks)
    header = np.zeros((), HEADER.dtype)
    for name, value in header_values(config, limits, layout, buffers, shared, tasks).items():
        header[name] = value
    header["vocab_limit"] = vocab_limit
    return Plan(config, limits, layout, header, tasks, buffers, phases, shared, active_fraction)


def why_not_sparse(config: ModelConfig) -> str | None:
    """Return why a model's feed-forwards cannot run as sparse ones, or None."""
    if config.hidden_act not in ("relu", "relu2"):
        return f"hidden_act is {config.hidden_act}, with which all neurons fire"
    if config.mlp_bias:
        return "the feed-forwards have biases"
    if config.ternary is not None:
        return "the weights are ternary"
    return None


def _check_sparse(config: ModelConfig, limits: Limits, active_fraction: float) -> None:
    if not 0 <= active_fraction <= 1:
        raise ConfigError(f"active_fraction is {active_fraction}; it is a share of the neurons, from 0 to 1")
    reason = why_not_sparse(config)
    if limits.sequences > 1:
        reason = f"they take one sequence, and {limits.sequences} were asked for"
    if reason is not None:
        raise DenseOnlyError(reason)


def _phases(config: ModelConfig, layer_kinds: tuple[Kind, ...]) -> tuple[PhaseInfo, ...]:
    kinds = [(kind, layer) for layer in range(config.num_hidden_layers) for kind in layer_kinds]
    kinds = [(Kind.EMBED, 0), *kinds, (Kind.HEAD, 0), (Kind.CHOOSE, 0)]
    return tuple(PhaseInfo(kind, layer, index) for index, (kind, layer) in enumerate(kinds))


def _fill(records: Records, frame: Frame, phase: PhaseInfo, shares: Partition) -> None:
    layer, index = phase.layer, phase.index
    match phase.kind:
        case Kind.EMBED:
            embed.tasks(records, frame, shares.hidden)
        case Kind.QKV:
            qkv.tasks(records, frame, layer, index, shares.products["qkv", layer])
        case Kind.ATTENTION:
            attention.tasks(records, frame, index, shares.heads)
        case Kind.COMBINE:
            combine.tasks(records, frame, index, shares.heads)
        case Kind.OUT:
            out.tasks(records, frame, layer, index, shares.hidden)
        case Kind.GATE_UP:
            gate_up.tasks(records, frame, layer, index, shares.products["gate_up", layer])
        case Kind.DOWN:
            down.tasks(records, frame, layer, index, shares.hidden)
        case Kind.GATE:
            gate.tasks(records, frame, layer, index, shares.products["gate", layer])
        case Kind.GATHER:
            gather.tasks(records, frame, index, shares.hidden)
        case Kind.HEAD:
            head.tasks(records, frame, index, shares.products["head", 0])
        case Kind.CHOOSE:
            choose.tasks(records, frame, index)


def _buffers(config: ModelConfig, limits: Limits, layout: WeightLayout) -> tuple[Buffer, ...]:
    """Place the buffers one after another. A word holds two bf16 values, or one float32 in partial, best and token."""
    partials = config.num_attention_heads * members_of(limits.ctas, config.num_key_value_heads)
    words = {
        "x": layout.hidden_rows // 2,
        "qkv": layout.matrices["qkv", 0].padded_rows // 2,
        "partial": partials * (config.head_dim + 2),
        "mixed": config.q_size // 2,
        "inner": 0 if layout.sparse else layout.matrices["gate_up", 0].padded_rows // 4,
    }
    if layout.sparse:
        words["sums"] = limits.ctas * layout.hidden_rows
        words["counts"] = config.num_hidden_layers
    buffers: list[Buffer] = []
    end = 0
    for name, count in words.items():
        buffers.append(Buffer(name, end, round_up(count, _ALIGN_WORDS)))
        end += _room(buffers[-1], limits.sequences)
    for name, count in (("best", 2 * limits.ctas), ("token", 1)):  # without gaps between the sequences
        buffers.append(Buffer(name, end, count))
        end += _room(buffers[-1], limits.sequences)
    return tuple(buffers)


def _room(buffer: Buffer, sequences: int) -> int:
    return round_up(buffer.words * sequences, _ALIGN_WORDS)


def tile_rows(flags: npt.NDArray[np.unsignedinteger[Any]]) -> Ints:
    """Return the rows of a row tile by a task's flags."""
    rows: Ints = np.where(flags & (Flag.TERNARY | Flag.INT8), 16, np.where(flags & Flag.ROWS_4, 4, 8))
    return rows


def unit_bytes(flags: npt.NDArray[np.unsignedinteger[Any]]) -> Ints:
    """Return the bytes of a weight unit by a task's flags."""
    size: Ints = np.where(flags & (Flag.TERNARY | Flag.INT8), SMALL_UNIT_BYTES, UNIT_BYTES)
    return size


def plan_shared(config: ModelConfig, limits: Limits, layout: WeightLayout, tasks: npt.NDArray[np.void]) -> SharedLayout:
    """Return the shared memory that these tasks need; raises ConfigError if it does not fit."""
    rows = tasks["count"] * tile_rows(tasks["flags"])
    summed = np.isin(tasks["kind"], [kind for kind in PRODUCTS if kind != Kind.HEAD])
    return shared_layout(
        limits,
        phases=tasks.shape[1],
        max_inputs=max(place.padded_columns for place in layout.matrices.values()),
        most_rows=int(rows[summed].max()),
        max_hidden_rows=_max_hidden_rows(tasks, layout),
        max_neurons=int(rows[tasks["kind"] == Kind.GATE].max(initial=0)),
        group=config.num_attention_heads // config.num_key_value_heads,
        head_dim=config.head_dim,
        quantised=None if config.ternary is None else _quantised(config, limits, layout, tasks),
    )


def _quantised(
    config: ModelConfig, limits: Limits, layout: WeightLayout, tasks: npt.NDArray[np.void]
) -> QuantisedSizes:
    """Return what products of int8 activations keep in shared memory."""
    most_scales, most_sums, slots = 0, 0, round_up(limits.consumer_warps, 4)
    for kind, matrix in _MATRIX_OF.items():
        column = tasks[:, tasks["kind"][0] == kind]
        place = layout.matrices[matrix, 0]
        rows = int(column["count"].max()) * place.tile_rows
        if place.form == "int8":
            run = quantised_run(place.k_units, limits.consumer_warps)
            rows = round_up(_INT8_RUN, run) * place.tile_rows
        if place.form == "int8":
            most_sums = max(most_sums, 2 * rows * slots)
        elif place.form == "ternary" and (config.ternary is None or config.ternary.group is None):
            most_sums = max(most_sums, rows * slots)
        elif place.form == "ternary":
            scales = rows * scales_of_row(config, place)
            most_sums, most_scales = max(most_sums, scales), max(most_scales, scales)
    return QuantisedSizes(most_sums, most_scales)


def _max_hidden_rows(tasks: npt.NDArray[np.void], layout: WeightLayout) -> int:
    return int(tasks["count"][:, 0].max()) * layout.matrices["out", 0].tile_rows


def header_values(
    config: ModelConfig,
    limits: Limits,
    layout: WeightLayout,
    buffers: tuple[Buffer, ...],
    shared: SharedLayout,
    tasks: npt.NDArray[np.void],
) -> dict[str, float]:
    """Return the header's fields but for vocab_limit, which the tokenizer decides."""
    values: dict[str, float] = {
        "embedding": layout.embedding_bytes,
        "phases": tasks.shape[1],
        "ctas": limits.ctas,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "hidden_rows": layout.hidden_rows,
        "kv_heads": config.num_key_value_heads,
        "num_pages": limits.num_pages,
        "table_pages": limits.table_pages,
        "block_pages": limits.block_pages,
        "members": members_of(limits.ctas, config.num_key_value_heads),
        "rope": layout.constants.rope,
        "q_norm": layout.constants.q_norm,
        "k_norm": layout.constants.k_norm,
        "embed_packed": int(layout.embed_packed),
        "embed_units": layout.head.k_units,
        "embed_rows_4": int(layout.head.tile_rows == 4),
        "eps": config.rms_norm_eps,
        "max_inputs": max(place.padded_columns for place in layout.matrices.values()),
        "max_rows": shared.max_rows,
        "head_dim": config.head_dim,
        "max_hidden_rows": _max_hidden_rows(tasks, layout),
        "x_at": shared.x - shared.tasks,
        "partial_at": shared.partial - shared.tasks,
        "residual_at": shared.residual - shared.tasks,
        "rest_at": shared.quantised - shared.tasks,
        "neuron_tiles": layout.matrices["gate", 0].row_tiles if layout.sparse else 0,
        "counts_word": 0,
        "inner": config.intermediate_size,
    }
    values |= {f"{kind}_scales": layout.constants.scales.get((kind, 0), 0) for kind in LAYER_MATRICES}
    values["layer_scales"] = layout.constants.layer_scales
    names = HEADER.dtype.names or ()
    for buffer in buffers:
        places = {f"{buffer.name}_word": buffer.word, f"{buffer.name}_words": buffer.words}
        values |= {name: value for name, value in places.items() if name in names}
    return values
