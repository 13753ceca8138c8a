"""Who does what: row tiles and KV heads shared out over CTAs.

The hidden rows have one owner for embed, out and down in all layers, because it keeps the residual in its shared
memory. That is uneven (a CTA owns 1 or 2 tiles of 256 on 132). "balanced" shares every other phase out evenly too, and
gives the tiles that are left over to the CTAs that have read the least so far. "level" goes further and gives CTAs with
fewer hidden tiles so much more of the other phases that all read the same bytes; but a phase ends with its slowest CTA,
and the ring of a CTA reaches only one or two phases ahead: on one NVIDIA H200 Llama-3.2-1B took 781 us a token with
"level" and 737 with even phases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from onekernel.config import ModelConfig
from onekernel.errors import ConfigError
from onekernel.phases.frame import HeadShare, Ints, Share
from onekernel.plan.chunks import members_of
from onekernel.weights.arena import LAYER_MATRICES, MatrixKind, MatrixPlace, WeightLayout

Strategy = Literal["balanced", "level"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Partition:
    """The shares of a plan. Products are keyed by matrix kind and layer; out and down have the hidden rows' share."""

    products: Mapping[tuple[MatrixKind, int], Share]
    hidden: Share
    heads: HeadShare

    def bytes_per_cta(self, layout: WeightLayout, active_fraction: float = 0.0) -> Floats:
        """Return the bytes of matrices each CTA reads per token, (ctas,), if that fraction of the neurons fires."""
        parts = [share.count * tile_cost(layout, key, active_fraction) for key, share in self.products.items()]
        total: Floats = np.sum(parts, axis=0)
        return total


def tile_cost(layout: WeightLayout, key: tuple[MatrixKind, int], active_fraction: float) -> float:
    """Return the bytes that a row tile costs: its own, and of a gate's tile those of its neurons that fire."""
    place = layout.matrices[key]
    if key[0] != "gate":
        return place.tile_bytes
    return place.tile_bytes + active_fraction * place.tile_rows * layout.neurons[key[1]].neuron_bytes


def make_partition(
    config: ModelConfig,
    layout: WeightLayout,
    ctas: int,
    strategy: Strategy = "balanced",
    order: Sequence[int] = (),
    active_fraction: float = 0.0,
) -> Partition:
    """Share out a model's tiles and heads over `ctas` CTAs.

    `order`, a permutation of the CTAs, says who gets the first share, the second, and so on. `active_fraction` of a
    sparse feed-forward's neurons are assumed to fire. Raises ConfigError if `order` is none, and for a strategy that
    does not exist or that a sparse feed-forward does not allow.
    """
    if strategy not in get_args(Strategy):
        raise ConfigError(f"partition is {strategy!r}; it must be {' or '.join(get_args(Strategy))}")
    if layout.sparse and strategy != "balanced":
        raise ConfigError(f"partition {strategy} is for dense feed-forwards; those that are sparse take balanced")
    if order and sorted(order) != list(range(ctas)):
        raise ConfigError(f"the order of {len(order)} CTAs is not a permutation of 0 to {ctas - 1}")
    hidden = _even(layout.hidden_tiles, ctas)
    counts = _balanced(layout, hidden, active_fraction) if strategy == "balanced" else _leveled(layout, hidden)
    place_of = np.argsort(order) if order else np.arange(ctas)
    products = {key: _share(count, place_of) for key, count in counts.items()}
    return Partition(products, products["out", 0], _share_heads(ctas, config.num_key_value_heads, place_of))


def _even(tiles: int, ctas: int) -> Ints:
    return np.diff(tiles * np.arange(ctas + 1) // ctas)


def _balanced(layout: WeightLayout, hidden: Ints, active_fraction: float) -> dict[tuple[MatrixKind, int], Ints]:
    counts: dict[tuple[MatrixKind, int], Ints] = {}
    load = np.zeros(len(hidden))
    for key, place in layout.matrices.items():
        counts[key] = hidden
        if key[0] not in ("out", "down"):
            counts[key] = np.full(len(hidden), place.row_tiles // len(hidden))
            counts[key][np.argsort(load, kind="stable")[: place.row_tiles % len(hidden)]] += 1
        load += counts[key] * tile_cost(layout, key, active_fraction)
    return counts


def _leveled(layout: WeightLayout, hidden: Ints) -> dict[tuple[MatrixKind, int], Ints]:
    counts: dict[tuple[MatrixKind, int], Ints] = {}
    load = np.zeros(len(hidden))
    for layer in range(len(layout.constants.attention_norms)):
        qkv, out, gate_up, down = (layout.matrices[kind, layer] for kind in LAYER_MATRICES)
        load += hidden * (out.tile_bytes + down.tile_bytes)
        # qkv gets its part of what the layer still has to give each CTA, gate_up exactly what levels the loads.
        both = _level(load, qkv.total_bytes + gate_up.total_bytes)
        counts["qkv", layer] = first = _whole(both * (qkv.row_tiles / both.sum()), qkv.row_tiles)
        load += first * qkv.tile_bytes
        counts["out", layer] = hidden
        counts["gate_up", layer] = second = _levelled(load, gate_up)
        load += second * gate_up.tile_bytes
        counts["down", layer] = hidden
    counts["head", 0] = _levelled(load, layout.head)
    return counts


def _levelled(load: Floats, place: MatrixPlace) -> Ints:
    return _whole(_level(load, place.total_bytes) / place.tile_bytes, place.row_tiles)


def _level(load: Floats, amount: float) -> Floats:
    """Return what each CTA gets of `amount` so that the least loaded ones end at one level."""
    rising = np.sort(load)
    below = rising * np.arange(1, len(load) + 1) - np.cumsum(rising)  # to bring all lower ones to this load
    filled = int(np.searchsorted(below, amount, side="right"))
    level = (amount + rising[:filled].sum()) / filled
    shares: Floats = np.maximum(level - load, 0.0)
    return shares


def _whole(shares: Floats, tiles: int) -> Ints:
    """Round shares of `tiles` tiles to whole ones: the largest remainders get what is left."""
    whole = np.floor(shares).astype(np.int64)
    left = tiles - int(whole.sum())
    whole[np.argsort(whole - shares, kind="stable")[:left]] += 1
    return whole


def _share(count: Ints, place_of: Ints) -> Share:
    first = np.cumsum(count) - count
    return Share(first[place_of], count[place_of])


def _share_heads(ctas: int, kv_heads: int, place_of: Ints) -> HeadShare:
    members = members_of(ctas, kv_heads)
    places = np.arange(ctas)
    if ctas < kv_heads:
        first, member = places, np.zeros_like(places)
        count = -(-(kv_heads - first) // ctas)
    else:
        first, member = places // members, places % members
        count = (first < kv_heads).astype(np.int64)
        first = np.where(count > 0, first, 0)
        member = np.where(count > 0, member, 0)
    stride = min(ctas, kv_heads)
    return HeadShare(first[place_of], count[place_of], member[place_of], members, stride)
