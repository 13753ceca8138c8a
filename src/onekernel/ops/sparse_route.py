"""Which way a sparse feed-forward is computed. Every way is exact; this is about time only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from onekernel.errors import ConfigError
from onekernel.kernels.sparse_ffn import INNER_MULTIPLE, SHARED_BYTES, Slices, SparseShape
from onekernel.weights.twell import TwellStatistics

RouteName = Literal["dense", "gather", "sliced", "hot_cold"]
ROUTES: tuple[RouteName, ...] = ("dense", "gather", "sliced", "hot_cold")

HOT_MULTIPLE = 64
CAPACITY = 64
"""Words of a tile where nothing was measured."""

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

    The defaults are predictions for an H200 from bytes, instructions and published rates; `benchmarks/sparse.py` prints
    what the parts take there.
    """

    memory_bytes_per_us: float = 4.3e6
    flop_per_us: float = 700e6
    gathered_bytes_per_us: float = 3.0e6
    call_us: float = 25.0
    """Launches of the sliced kernels, and filling their shared memory's first words."""
    token_us: float = 0.005
    column_us: float = 0.3e-6
    """A nonzero's up and down rows, per column of hidden_size."""

    def dense(self, tokens: int, hidden: int, neurons: int) -> float:
        """Return the time of the up and down products of some neurons, and of what lies between them."""
        weights = 4 * neurons * hidden
        products = max(weights / self.memory_bytes_per_us, tokens * weights / self.flop_per_us)
        return products + 6 * tokens * neurons / self.memory_bytes_per_us

    def gather(self, tokens: int, hidden: int, nonzeros: float) -> float:
        """Return the time of the per-token kernel."""
        return 5.0 + nonzeros * 4 * hidden / self.gathered_bytes_per_us + tokens * self.token_us

    def sliced(self, tokens: int, hidden: int, neurons: int, nonzeros: float) -> float:
        """Return the time of the sliced kernels for some neurons and their nonzeros."""
        moved = (4 * neurons * hidden + 2 * tokens * neurons) / self.memory_bytes_per_us
        return self.call_us + moved + tokens * self.token_us + nonzeros * hidden * self.column_us


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
    found = [(costs.dense(tokens, hidden, inner), Route("dense"))]
    found.append((costs.gather(tokens, hidden, nonzeros), Route("gather")))
    counts = stats.neuron_counts.cpu().sort(descending=True)[0].float()
    # The largest of many random counts promise too much: two deviations less are believed.
    believed = (counts - 2 * counts.sqrt()).clamp(min=0)
    in_hot = (torch.cat([torch.zeros(1), believed.cumsum(0)]) * scale).tolist()
    for hot in range(0, inner - INNER_MULTIPLE + 1, HOT_MULTIPLE):
        if not _fits(shape, hidden, inner, hot, shared_bytes):
            continue
        cold = nonzeros - in_hot[hot]
        capacity = _capacity(stats, cold / max(nonzeros, 1))
        time = costs.sliced(tokens, hidden, inner - hot, cold)
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


def _fits(shape: SparseShape, hidden: int, inner: int, hot: int, shared_bytes: int) -> bool:
    try:
        Slices.plan(shape, hidden, inner, first=hot, shared_bytes=shared_bytes)
    except ConfigError:
        return False
    return True
