"""From what earlier calls of a feed-forward counted to the way of the next one, without ever waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onekernel.errors import ConfigError
from onekernel.kernels.sparse_ffn import OVERFLOWED, PACKED, SHARED_BYTES, SLICED, TOTALS, Slices, SparseShape
from onekernel.ops.mailbox import Mailbox
from onekernel.ops.sparse_route import H200, Costs, Route, choose, hot_first, wider
from onekernel.weights.twell import TILE_COLUMNS, TwellStatistics

MEASURE_EVERY = 256
"""Calls without packing from one measurement to the next: it reads the gate's values once more."""

DRIFT = 2.0
"""How many times the expected nonzeros (and one more per token) may come before a way is reconsidered."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a feed-forward was last seen to do: `nonzero_fraction` of `rows` tokens, and the way that followed."""

    rows: int
    nonzero_fraction: float
    fullest_row: int
    overflowed_rows: int
    route: Route


class Router:
    """Chooses the ways of one feed-forward. The first call is dense and measured; `forced` fixes the way instead.

    While a CUDA graph is captured nothing is read and nothing changes: a graph keeps the ways that were known then. Not
    for several threads.
    """

    def __init__(
        self,
        shape: SparseShape,
        hidden: int,
        inner: int,
        *,
        forced: Route | None = None,
        costs: Costs = H200,
        shared_bytes: int = SHARED_BYTES,
    ) -> None:
        self._shape, self._hidden, self._inner, self._costs = shape, hidden, inner, costs
        self._shared_bytes = shared_bytes
        self._forced = forced
        self._stats: TwellStatistics | None = None
        self._routes: dict[int, Route] = {}
        self._last = forced or Route()
        self._measured_mail, self._totals_mail = Mailbox(), Mailbox()
        self._measured_rows = 0
        self._calls_since = MEASURE_EVERY
        self._totals = torch.zeros(TOTALS, dtype=torch.int32)
        self._overflowed = 0
        self._expected = self._expected_in_mail = self._expected_before = 0.0
        self._ordered = False
        try:
            self.tile_columns = Slices.plan(shape, hidden, inner, shared_bytes=shared_bytes).tile_columns
        except ConfigError:  # too many neurons for slices; the other ways remain
            self.tile_columns = TILE_COLUMNS

    @property
    def measured(self) -> Measured | None:
        """What is known, or None before the first measurement has arrived."""
        self._read_mail()
        if self._stats is None:
            return None
        stats = self._stats
        return Measured(stats.rows, stats.nonzero_fraction, stats.fullest_row, self._overflowed, self._last)

    def next(self, tokens: int, *, frozen: bool = False) -> Route:
        """Return the way for a call with so many tokens; `frozen`: by what was known before, for a graph's capture."""
        if not frozen:
            self._read_mail()
        self._last = self._forced or self._route(tokens)
        return self._last

    def measurement(self, device: torch.device) -> torch.Tensor | None:
        """Return the vector that the next call is to fill with what it finds, or None if it need not look."""
        self._calls_since += 1
        counted = self._last.name in ("sliced", "hot_cold") and self._forced is None  # by the kernels, in `totals`
        if counted or self._calls_since <= MEASURE_EVERY:
            return None
        self._calls_since = 0
        length = TwellStatistics.numbers(self._inner, self.tile_columns)
        return torch.empty(length, dtype=torch.int64, device=device)

    def sent(self, tokens: int, totals: torch.Tensor, measured: torch.Tensor | None) -> None:
        """Send what a call leaves on the device to the host, behind that call."""
        if measured is not None and self._measured_mail.send(measured):
            self._measured_rows = tokens
        if self._last.name in ("sliced", "hot_cold"):
            self._expected += tokens * self._sparse_nonzeros(self._last.hot)
            if self._totals_mail.send(totals):
                self._expected_in_mail = self._expected

    def take_order(self) -> torch.Tensor | None:
        """Return, once, the order into which the neurons are to be put before the way that `next` returned."""
        if self._last.name != "hot_cold" or self._ordered or self._stats is None:
            return None
        self._ordered = True
        hot = self._last.hot
        slices = Slices.plan(self._shape, self._hidden, self._inner, first=hot, shared_bytes=self._shared_bytes)
        return hot_first(self._stats, hot, slices.tiles)

    def _route(self, tokens: int) -> Route:
        """Return the fastest known way, the same for numbers of tokens of the same bit length."""
        if self._stats is None:
            return Route()
        size = tokens.bit_length()
        if size not in self._routes:
            given = (self._hidden, self._shape, self._costs, self._shared_bytes)
            self._routes[size] = choose(self._stats, tokens, *given)
        return self._routes[size]

    def _read_mail(self) -> None:
        if (vector := self._measured_mail.take()) is not None:
            self._stats = TwellStatistics.read(vector, self._measured_rows, self._inner)
            self._routes.clear()
            self._ordered = self._forced is not None
        if (totals := self._totals_mail.take()) is not None:
            self._compare(totals)

    def _compare(self, totals: torch.Tensor) -> None:
        """Make room where tiles overflow; look again if tokens are no longer like those that were measured."""
        new = (totals - self._totals).tolist()  # wraps around as the device's sums do
        expected = self._expected_in_mail - self._expected_before
        self._totals, self._expected_before = totals, self._expected_in_mail
        self._overflowed = new[OVERFLOWED]
        self._routes = {size: wider(route, new[OVERFLOWED], new[SLICED]) for size, route in self._routes.items()}
        slack = DRIFT * (expected + new[SLICED])
        if self._forced is None and new[PACKED] > slack:
            self._stats = None  # the next call is dense and measured
            self._calls_since = MEASURE_EVERY

    def _sparse_nonzeros(self, hot: int) -> float:
        """Return the nonzeros of a token outside the `hot` most active neurons, as they were measured."""
        if self._stats is None:
            return 0.0
        counts = self._stats.neuron_counts.sort(descending=True)[0]
        return float(counts[hot:].sum()) / max(self._stats.rows, 1)
