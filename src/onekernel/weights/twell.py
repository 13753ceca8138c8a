"""TwELL, tile-wise ELLPACK: the nonzeros of an activation in tiles of columns, without losing any.

The format of 'Sparser, Faster, Lighter Transformer Language Models' (arXiv 2603.23198), with two differences: counts
stand apart from the words, and a row that does not fit is kept whole instead of being overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from onekernel.errors import ConfigError

TILE_COLUMNS = 256
MAX_COLUMNS = 1 << 16
"""A word holds the column in 16 bits."""

OVERFLOW_ROWS = 1 / 1024
"""The share of rows that may overflow when a capacity is chosen: their rescue costs more than the words it saves."""

_CHUNK_ENTRIES = 4096


@dataclass(frozen=True, slots=True)
class Entries:
    """Nonzeros one by one, by row and then by column: int64 rows and columns, values in the activation's dtype."""

    rows: torch.Tensor
    columns: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Twell:
    """The nonzeros of a (rows, columns) bf16 activation.

    A row is cut into tiles of `tile_columns`; `words[row, tile, :counts[row, tile]]` are that tile's nonzeros in the
    order of columns, each the column (low 16 bits) and the bits of its value (high 16). Words past the count mean
    nothing. A row with a tile of more than `capacity` nonzeros has counts of 0 and lies whole in the overflow area.
    """

    words: torch.Tensor
    """(rows, tiles, capacity) int32."""
    counts: torch.Tensor
    """(rows, tiles) int32."""
    overflow_rows: torch.Tensor
    """(overflowing rows,) int64, ascending."""
    overflow_values: torch.Tensor
    """(overflowing rows, columns) bf16."""
    columns: int
    tile_columns: int

    @property
    def capacity(self) -> int:
        """Nonzeros that a tile has room for."""
        return self.words.shape[2]

    @classmethod
    def pack(cls, values: torch.Tensor, capacity: int, tile_columns: int = TILE_COLUMNS) -> Twell:
        """Return the packed form of a (rows, columns) bf16 activation.

        Raises ConfigError for another shape or dtype, too many columns, or a capacity that is not 1 to `tile_columns`.
        """
        if values.dim() != 2:
            raise ConfigError(f"the activation has shape {tuple(values.shape)}; it must be (rows, columns)")
        columns = values.shape[1]
        if values.dtype is not torch.bfloat16:
            raise ConfigError(f"the activation is {values.dtype}; TwELL words hold bfloat16 values")
        if columns > MAX_COLUMNS:
            raise ConfigError(f"the activation has {columns} columns; a TwELL word can name {MAX_COLUMNS}")
        if not 1 <= capacity <= tile_columns:
            raise ConfigError(f"capacity is {capacity}; it must be 1 to the {tile_columns} columns of a tile")
        tiled = _tiled(values, tile_columns)
        counts = (tiled != 0).sum(-1, dtype=torch.int32)
        over = (counts > capacity).any(-1)
        counts.masked_fill_(over[:, None], 0)
        words = values.new_zeros(*counts.shape, capacity, dtype=torch.int32)
        row, tile, inside = ((tiled != 0) & ~over[:, None, None]).nonzero(as_tuple=True)
        first = counts.flatten().cumsum(0) - counts.flatten()
        slot = torch.arange(len(row), device=values.device) - first[row * counts.shape[1] + tile]
        bits = tiled[row, tile, inside].view(torch.int16).to(torch.int32)
        words[row, tile, slot] = bits << 16 | (tile * tile_columns + inside).to(torch.int32)
        overflow = over.nonzero().flatten()
        return cls(words, counts, overflow, values[overflow], columns, tile_columns)

    def entries(self) -> Entries:
        """Return every nonzero, those of the overflow area included."""
        used = torch.arange(self.capacity, device=self.words.device) < self.counts[..., None]
        row, _, _ = used.nonzero(as_tuple=True)
        words = self.words[used]
        over, column = (self.overflow_values != 0).nonzero(as_tuple=True)
        rows = torch.cat([row, self.overflow_rows[over]])
        order = rows.argsort(stable=True)
        columns = torch.cat([(words & 0xFFFF).to(torch.int64), column])
        values = torch.cat([(words >> 16).to(torch.int16).view(torch.bfloat16), self.overflow_values[over, column]])
        return Entries(rows[order], columns[order], values[order])

    def unpack(self) -> torch.Tensor:
        """Return the activation: bit by bit what was packed, but for the sign of zeros."""
        found = self.entries()
        whole = self.words.new_zeros(self.words.shape[0], self.columns, dtype=torch.bfloat16)
        whole[found.rows, found.columns] = found.values
        return whole


@dataclass(frozen=True, slots=True)
class TwellStatistics:
    """What decides how an activation is packed and multiplied; histograms rather than means, as rows differ widely."""

    rows: int
    columns: int
    nonzeros: int
    fullest_row: int
    neuron_counts: torch.Tensor
    """(columns,) int64: rows in which each column is not zero."""
    peaks: torch.Tensor
    """(tile_columns + 1,) int64: rows by the number of nonzeros in their fullest tile."""

    @classmethod
    def of(cls, values: torch.Tensor, tile_columns: int = TILE_COLUMNS) -> TwellStatistics:
        """Measure a (rows, columns) activation; raises ConfigError for another shape or no columns."""
        if values.dim() != 2 or values.shape[1] == 0:
            raise ConfigError(f"the activation has shape {tuple(values.shape)}; it must be (rows, 1 or more columns)")
        return cls.read(cls.measure(values != 0, tile_columns), *values.shape)

    @staticmethod
    def measure(active: torch.Tensor, tile_columns: int) -> torch.Tensor:
        """Return as one int64 vector what `read` needs; on a GPU nothing waits. active: (rows, columns) bool."""
        counts = _tiled(active, tile_columns).sum(-1)
        peaks = torch.zeros(tile_columns + 1, dtype=torch.int64, device=active.device)
        peaks.index_add_(0, counts.amax(-1), torch.ones_like(counts[:, 0]))
        in_rows = counts.sum(-1)
        fullest = torch.cat([in_rows, in_rows.new_zeros(1)]).amax()
        return torch.cat([torch.stack([in_rows.sum(), fullest]), active.sum(0), peaks])

    @staticmethod
    def numbers(columns: int, tile_columns: int) -> int:
        """Return the length of what `measure` returns."""
        return 2 + columns + tile_columns + 1

    @classmethod
    def read(cls, vector: torch.Tensor, rows: int, columns: int) -> TwellStatistics:
        """Return what `measure` found in a (rows, columns) activation."""
        nonzeros, fullest = vector[:2].tolist()
        return cls(rows, columns, nonzeros, fullest, vector[2 : 2 + columns], vector[2 + columns :])

    @property
    def nonzero_fraction(self) -> float:
        """Nonzeros of all values, 0 to 1."""
        return self.nonzeros / max(self.rows * self.columns, 1)

    def capacity(self, overflow_rows: float = OVERFLOW_ROWS, multiple: int = 4) -> int:
        """Return the smallest multiple of `multiple` that at most this share of the rows exceeds in some tile."""
        exceeding = self.rows - self.peaks.cumsum(0)
        largest = len(self.peaks) - 1
        for capacity in range(multiple, largest, multiple):
            if int(exceeding[capacity]) <= overflow_rows * self.rows:
                return capacity
        return largest


def gated_product(
    packed: Twell,
    x: torch.Tensor | None,
    up: torch.Tensor | None,
    down_rows: torch.Tensor,
    activate: Callable[[torch.Tensor], torch.Tensor] = F.relu,
) -> torch.Tensor:
    """Return sum over nonzeros of activate(value) * (x . up[column]) * down_rows[column]: (rows, hidden), float32.

    x: (rows, hidden); up, down_rows: (columns, hidden). Without `up` the factor x . up is 1. What meets down_rows is
    rounded to its dtype, as in a dense feed-forward. The authority for the kernels; slow.
    """
    found = packed.entries()
    out = down_rows.new_zeros(packed.words.shape[0], down_rows.shape[1], dtype=torch.float32)
    for start in range(0, len(found.rows), _CHUNK_ENTRIES):
        rows, columns, values = (
            part[start : start + _CHUNK_ENTRIES] for part in (found.rows, found.columns, found.values)
        )
        inner = activate(values.float())
        if up is not None and x is not None:
            inner = inner * (x[rows].float() * up[columns].float()).sum(-1)
        inner = inner.to(down_rows.dtype).float()
        out.index_add_(0, rows, inner[:, None] * down_rows[columns].float())
    return out


def _tiled(values: torch.Tensor, tile_columns: int) -> torch.Tensor:
    rows, columns = values.shape
    tiles = -(-columns // tile_columns)
    return F.pad(values, (0, tiles * tile_columns - columns)).view(rows, tiles, tile_columns)
