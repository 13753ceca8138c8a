"""The arenas that a plan's offsets point into, and which tiles to pack them in.

The layout itself is `weights/arena.py`, because packing needs it and may not know of plans.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal, get_args

from onekernel.config import ModelConfig
from onekernel.weights.arena import (
    LAYER_MATRICES,
    SMALL_UNIT_BYTES,
    UNIT_BYTES,
    ConstantsLayout,
    MatrixKind,
    MatrixPlace,
    Rows,
    TileRows,
    WeightLayout,
    round_up,
    scales_of_row,
    weight_layout,
)

__all__ = [
    "LAYER_MATRICES",
    "SMALL_UNIT_BYTES",
    "UNIT_BYTES",
    "ConstantsLayout",
    "MatrixKind",
    "MatrixPlace",
    "TileRows",
    "TileRowsChoice",
    "WeightLayout",
    "choose_layout",
    "round_up",
    "scales_of_row",
    "weight_layout",
]

TileRowsChoice = Literal["auto"] | Rows | TileRows

TOLERATED_WASTE = 0.05
"""With 8-row tiles the slowest CTA may read this much more than an even share of the weights without padding."""


def choose_layout(
    config: ModelConfig,
    choice: TileRowsChoice,
    context_tokens: int,
    slowest: Callable[[WeightLayout], float],
    active_fraction: float | None = None,
) -> WeightLayout:
    """Return the layout with the tile rows that were asked for; "auto": 8 rows unless they waste more than 5 %.

    `active_fraction`: of a sparse feed-forward's neurons, those that are assumed to fire; None: it is dense.
    `slowest` says how many bytes of matrices per token the most loaded CTA would read, times the number of CTAs. Of all
    ways to use 4-row tiles the one with the least waste is taken, and of equals the one with the most 8-row tiles.
    """

    def layout_of(tile_rows: TileRows) -> WeightLayout:
        return weight_layout(config, tile_rows, context_tokens=context_tokens, sparse=active_fraction is not None)

    if isinstance(choice, TileRows):
        return layout_of(choice)
    if choice != "auto":
        return layout_of(TileRows(choice, choice, choice, choice))
    best = layout_of(TileRows())
    least = slowest(best)
    if config.ternary is not None:
        # Only the head can choose, and only if it is dense: most of the bytes are there.
        other = layout_of(TileRows(head=4))
        return best if least <= slowest(other) else other
    matrices = 3 if active_fraction is None else 1 + 2 * active_fraction
    needed = (
        config.num_hidden_layers
        * config.hidden_size
        * (2 * config.q_size + 2 * config.kv_size + matrices * config.intermediate_size)
    )
    needed_bytes = 2 * (needed + config.vocab_size * config.hidden_size)
    if least <= (1 + TOLERATED_WASTE) * needed_bytes:
        return best
    for rows in sorted(itertools.product(get_args(Rows), repeat=4), key=sum, reverse=True):
        layout = layout_of(TileRows(*rows))
        if slowest(layout) < least:
            best, least = layout, slowest(layout)
    return best
