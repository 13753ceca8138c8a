"""What all CTAs of an interpreted launch share: the plan, the arenas, the cache, and the caller's wishes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from onekernel.config import PAGE_TOKENS
from onekernel.errors import PlanError
from onekernel.phases.attention.cache import places
from onekernel.plan.abi import HEADER
from onekernel.plan.exchange import F32, Exchange, bf16_to_float
from onekernel.plan.layout import UNIT_BYTES
from onekernel.plan.plan import Plan

F64 = npt.NDArray[np.float64]


@dataclass(slots=True)
class Machine:
    """One launch. Arrays are views of the caller's tensors, so keys and values are appended in place."""

    plan: Plan
    arena: npt.NDArray[np.uint8]
    constants: F32
    pages: npt.NDArray[np.uint16]
    """(layers, pages, kv_heads, 2, PAGE_TOKENS, head_dim), bf16 as bits."""
    page_table: npt.NDArray[np.int64]
    """(sequences, table_pages)."""
    first_tokens: Sequence[int]
    positions: Sequence[int]
    limit: int
    stop_ids: frozenset[int]
    exchange: Exchange
    slots: list[list[int]] = field(default_factory=list)
    """For each sequence, the words the host would see: token | bits."""
    logits: list[F32] = field(default_factory=list)
    """For each token, (sequences, vocab_limit); NaN until a CTA writes them."""
    header: dict[str, int] = field(init=False)
    _matrices: dict[tuple[int, int, int, int], F64] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.header = {name: self.plan.header[name].item() for name in HEADER.dtype.names or ()}
        self.slots = [[] for _ in self.first_tokens]

    def tag(self, token: int, phase: int) -> int:
        """Return the tag of a phase's values."""
        return token * self.header["phases"] + phase + 1

    def floats(self, offset: int, count: int) -> F32:
        """Return constants; raises PlanError outside their arena."""
        if offset < 0 or offset + count > len(self.constants):
            raise PlanError(
                f"constants {offset} to {offset + count - 1} lie outside the arena of {len(self.constants)}"
            )
        return self.constants[offset : offset + count]

    def bytes(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """Return weights; raises PlanError outside their arena."""
        if offset < 0 or offset + size > len(self.arena):
            raise PlanError(f"weights {offset} to {offset + size - 1} lie outside the arena of {len(self.arena)} bytes")
        return self.arena[offset : offset + size]

    def matrix(self, offset: int, tiles: int, k_units: int, tile_rows: int) -> F64:
        """Return row tiles of packed weights, (tiles * tile_rows, K), in float64: then no sum depends on its order."""
        key = (offset, tiles, k_units, tile_rows)
        if key not in self._matrices:
            split = 8 // tile_rows
            packed = self.bytes(offset, tiles * k_units * UNIT_BYTES).view(np.uint16)
            # The order of a unit is that of weights/dense.py: (half, split, row, quarter, 8 columns).
            units = packed.reshape(tiles, k_units, 2, split, tile_rows, 4, 8)
            rows = units.transpose(0, 4, 1, 3, 5, 2, 6).reshape(tiles * tile_rows, -1)
            self._matrices[key] = bf16_to_float(rows).astype(np.float64)
        return self._matrices[key]

    def neurons(self, layer: int, first: int, count: int) -> F64:
        """Return neurons of a sparse feed-forward, (count, 2, width) in float64: up in the inputs' order, then down."""
        place = self.plan.layout.neurons[layer]
        start = place.offset_bytes + first * place.neuron_bytes
        rows = self.arena[start : start + count * place.neuron_bytes].view(np.uint16).reshape(count, 2, place.width)
        up = rows[:, 0].reshape(count, -1, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(count, -1)
        return bf16_to_float(np.stack((up, rows[:, 1]), axis=1)).astype(np.float64)

    def cached(self, layer: int, head: int, sequence: int, position: int) -> npt.NDArray[np.uint16]:
        """Return a position's key and value, (2, head_dim) bf16."""
        rows, order = self._rows(layer, head, sequence, position)
        return rows[:, order]

    def append(self, layer: int, head: int, sequence: int, position: int, both: npt.NDArray[np.uint16]) -> None:
        """Keep a position's key and value, (2, head_dim) bf16."""
        rows, order = self._rows(layer, head, sequence, position)
        rows[:, order] = both

    def _rows(
        self, layer: int, head: int, sequence: int, position: int
    ) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]:
        page, slot = self.page_table[sequence, position // PAGE_TOKENS], position % PAGE_TOKENS
        rows = self.pages[layer, page, head, :, slot]
        return rows, places(rows.shape[1])[slot].numpy()

    def note_logits(self, token: int, sequence: int, first: int, logits: F32) -> None:
        """Keep logits of tokens from `first` on."""
        while len(self.logits) <= token:
            self.logits.append(np.full((len(self.first_tokens), self.header["vocab_limit"]), np.nan, np.float32))
        self.logits[token][sequence, first : first + len(logits)] = logits
