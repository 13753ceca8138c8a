"""Which way a sparse feed-forward is computed. Every way is exact; this is about time only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from onekernel.errors import ConfigError
from onekernel.kernels.sparse_ffn import INNER_MULTIPLE, MOST_DOWN_COLUMNS, SHARED_BYTES, Slices, SparseShape
from onekernel.weights.twell import TwellStatistics

RouteName = Literal["dense", "gather", "sliced", "hot_cold"]
ROUTES: tuple[RouteName, ...] = ("dense", "gather", "sliced", "hot_cold")

HOT_MULTIPLE = 64
CAPACITY = 64
"""Words of a tile where nothing was measured."""

PROMISE = 0.97
"""The share of the dense way's time under which another is taken: predictions err, and dense is never wrong."""

MOST_CAPACITY = 256
"""Wider tiles would take more memory for partial sums than the rescue of a few rows costs time."""


@dataclass(frozen=True, slots=True)
class Route:
    """dense: three matrix products. gather: the gate's product, then one CTA per token reads its active neurons.

    sliced: the gate's product, then kernels that keep slices of the weights in shared memory. hot_cold: the first `hot`
    neurons densely, the others as in sliced. `capacity`: words of a TwELL tile.
    """

    name: RouteName = "dense"
    hot: int = 0
    capacity: int = CAPACITY

    def __post_init__(self) -> None:
        if self.name not in ROUTES:
            raise ConfigError(f"route is {self.name!r}; it must be {', '.join(ROUTES)}")
        if (self.hot > 0) != (self.name == "hot_cold") or self.hot % INNER_MULTIPLE:
            raise ConfigError(
                f"{self.hot} hot neurons on route {self.name}; hot_cold takes a multiple of {INNER_MULTIPLE} above 0, "
                f"the others 0"
            )


@dataclass(frozen=True, slots=True)
class Costs:
    """Microseconds of the parts of each way on one GPU.

    The defaults are fitted to an H200's times at 16,384 tokens, which they meet within 15 per cent of the sparse part.
    """

    memory_bytes_per_us: float = 4.3e6
    flop_per_us: float = 850e6
    gathered_bytes_per_us: float = 12e6
    gathered_token_us: float = 0.05
    row_bytes_per_us: float = 50e3
    """What one CTA of the per-token kernel reads: few tokens wait for the fullest."""
    launch_us: float = 4.0
    token_us: float = 0.0274
    """Of the sliced kernels where a CTA of down.cu holds 16 columns; with 8 columns twice as much."""
    column_us: float = 0.578e-6
    """A nonzero's up and down rows, per column of hidden_size."""

    def dense(self, tokens: int, hidden: int, neurons: int) -> float:
        """Return the time of the up and down products of some neurons, and of what lies between them."""
        weights = 4 * neurons * hidden
        products = max(weights / self.memory_bytes_per_us, tokens * weights / self.flop_per_us)
        return 3 * self.launch_us + products + 6 * tokens * neurons / self.memory_bytes_per_us

    def gather(self, tokens: int, hidden: int, nonzeros: float, fullest_row: int) -> float:
        """Return the time of the per-token kernel."""
        together = tokens * self.gathered_token_us + nonzeros * 4 * hidden / self.gathered_bytes_per_us
        return self.launch_us + max(together, fullest_row * 4 * hidden / self.row_bytes_per_us)

    def sliced(self, tokens: int, hidden: int, neurons: int, nonzeros: float, down_columns: int) -> float:
        """Return the time of the sliced kernels for some neurons and their nonzeros."""
        moved = (4 * neurons * hidden + 2 * tokens * neurons) / self.memory_bytes_per_us
        passed = tokens * self.token_us * MOST_DOWN_COLUMNS / down_columns
        return 5 * self.launch_us + moved + passed + nonzeros * hidden * self.column_us


H200 = Costs()


def choose(
    stats: TwellStatistics,
    tokens: int,
    hidden: int,
    shape: SparseShape,
    costs: Costs = H200,
    shared_bytes: int = SHARED_BYTES,
) -> Route:
    """Return the fastest way for `tokens` tokens like those that were measured.

    hot_cold presumes that the neurons are put into `hot_first`'s order before.
    """
    inner, scale = stats.columns, tokens / max(stats.rows, 1)
    nonzeros = stats.nonzeros * scale
    found = [
        (PROMISE * costs.dense(tokens, hidden, inner), Route("dense")),
        (costs.gather(tokens, hidden, nonzeros, stats.fullest_row), Route("gather")),
    ]
    counts = stats.neuron_counts.cpu().sort(descending=True)[0].float()
    # The largest of many random counts promise too much: two deviations less are believed.
    believed = (counts - 2 * counts.sqrt()).clamp(min=0)
    in_hot = (torch.cat([torch.zeros(1), believed.cumsum(0)]) * scale).tolist()
    for hot in range(0, inner - INNER_MULTIPLE + 1, HOT_MULTIPLE):
        try:
            slices = Slices.plan(shape, hidden, inner, first=hot, shared_bytes=shared_bytes)
        except ConfigError:  # too many sparse neurons for shared memory
            continue
        cold = nonzeros - in_hot[hot]
        capacity = _capacity(stats, cold / max(nonzeros, 1))
        time = costs.sliced(tokens, hidden, inner - hot, cold, slices.down_columns)
        time += costs.dense(tokens, hidden, hot) if hot else 0.0
        found.append((time, Route("hot_cold" if hot else "sliced", hot, capacity)))
    return min(found, key=lambda pair: pair[0])[1]


def hot_first(stats: TwellStatistics, hot: int, tiles: int) -> torch.Tensor:
    """Return an order of the neurons: the `hot` most active first, the others dealt over `tiles` equally busy tiles."""
    ranked = stats.neuron_counts.cpu().argsort(descending=True, stable=True)
    dealt = [ranked[hot:][tile::tiles] for tile in range(tiles)]
    return torch.cat([ranked[:hot], *dealt])


def wider(route: Route, overflowed: int, rows: int) -> Route:
    """Return the route with room for twice as much if more than one row in 4,096 overflowed: rescues take long."""
    if overflowed * 4096 <= rows or route.capacity >= MOST_CAPACITY:
        return route
    return replace(route, capacity=min(2 * route.capacity, MOST_CAPACITY))


def _capacity(stats: TwellStatistics, cold_share: float) -> int:
    """Return words for the fullest tile that was seen and a quarter more, or where that is much, for most rows.

    `cold_share` of the nonzeros are packed; half more than that is taken for their share of the fullest tile.
    """
    seen = min(stats.capacity(overflow_rows=0.0) * 5 // 4, max(stats.capacity(overflow_rows=1 / 16), MOST_CAPACITY))
    return max(int(seen * min(1.5 * cold_share, 1.0)) // 4 * 4, 8)
