"""The way of a feed-forward: dense and measured at first, then what the counts say, frozen while a graph is made."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.sparse_patterns import TOKEN_SPREAD, Pattern, iid, skew
from onekernel.errors import ConfigError
from onekernel.kernels.sparse_ffn import GATHERED, OVERFLOWED, PACKED, SLICED, Slices, SparseShape
from onekernel.ops.mailbox import Mailbox
from onekernel.ops.sparse_route import MOST_CAPACITY, Costs, Route, choose, hot_first, wider
from onekernel.ops.sparse_router import MEASURE_EVERY, Router
from onekernel.weights.twell import TwellStatistics

SHAPE = SparseShape()
HIDDEN, INNER = 2048, 5632
CPU = torch.device("cpu")
TOKENS = 16384
ONLY_SLICED = Costs(flop_per_us=1.0, gathered_token_us=1e9)
"""Of a GPU on which any dense product is slower."""


def even(fraction: float, rows: int = 64) -> TwellStatistics:
    """As many nonzeros in every row and column."""
    torch.manual_seed(0)
    return TwellStatistics.of(torch.rand(rows, INNER) < fraction, 1408)


def skewed(fraction: float, rows: int = 64) -> TwellStatistics:
    """One neuron in ten holds nine nonzeros in ten; they lie scattered."""
    torch.manual_seed(0)
    rates = torch.full((INNER,), fraction / 9)
    rates[::10] = min(9 * fraction, 1.0)
    return TwellStatistics.of(torch.rand(rows, INNER) < rates, 1408)


@pytest.mark.parametrize(
    ("stats", "tokens", "name"),
    [
        (even(0.003), TOKENS, "sliced"),
        (even(0.02), TOKENS, "dense"),
        (even(0.9), 1, "dense"),
        (even(0.1), 1, "dense"),
        (even(0.01), 1, "gather"),
        (skewed(0.006, 2048), TOKENS, "hot_cold"),
    ],
)
def test_the_fastest_way_is_taken(stats: TwellStatistics, tokens: int, name: str) -> None:
    assert choose(stats, tokens, HIDDEN, SHAPE).name == name


def patterned(pattern: Pattern, tokens: int, fullest_row: int) -> TwellStatistics:
    """What a benchmark's pattern gives on average; its fullest token spreads over four tiles."""
    spread = math.sqrt(1 + TOKEN_SPREAD**2) if pattern.name == "skew" else 1.0
    counts = torch.special.ndtr(pattern.neurons.double() / spread) * tokens
    inner, nonzeros = len(counts), int(counts.sum())
    tile_columns = Slices.plan(SHAPE, HIDDEN, inner).tile_columns
    peaks = torch.zeros(tile_columns + 1, dtype=torch.int64)
    peaks[-(-fullest_row // 3)] = tokens
    return TwellStatistics(tokens, inner, nonzeros, fullest_row, counts.round().long(), peaks)


@pytest.mark.parametrize(
    ("pattern", "tokens", "fullest_row", "sparse_us", "dense_us"),
    [
        (skew(0.005, 0, 1, 5632), TOKENS, 182, 1316, 1531),
        (skew(0.01, 0, 1, 5632), TOKENS, 297, 1563, 1604),
        (iid(0.01, 1, 5632), TOKENS, 89, 1925, 1546),
        (skew(0.02, 0, 1, 5632), TOKENS, 464, 1672, 1531),
        (skew(0.05, 0, 1, 5632), TOKENS, 857, 1908, 1555),
        (skew(0.1, 0, 1, 5632), TOKENS, 1387, 1859, 1537),
        (skew(0.005, 0, 1, 8192), TOKENS, 235, 2101, 2198),
        (iid(0.01, 1, 8192), TOKENS, 118, 3335, 2215),
        (skew(0.02, 0, 1, 8192), TOKENS, 668, 2235, 2205),
        (skew(0.05, 0, 1, 8192), TOKENS, 1244, 2655, 2220),
        (skew(0.1, 0, 1, 8192), TOKENS, 1993, 2741, 2222),
        (skew(0.00639, 0, 1, 5632), 1, 36, 23, 32),
        (iid(0.1016, 1, 5632), 1, 572, 105, 32),
        (skew(0.00728, 0, 1, 5632), 8, 67, 29, 32),
    ],
)
def test_the_way_that_was_faster_on_an_h200_is_taken(
    pattern: Pattern, tokens: int, fullest_row: int, sparse_us: float, dense_us: float
) -> None:
    """Times of both ways as measured at commit c1dc158, whose router took the sparse one for all of these."""
    route = choose(patterned(pattern, tokens, fullest_row), tokens, HIDDEN, SHAPE)
    assert (route.name == "dense") == (dense_us < sparse_us)


def test_costs_decide() -> None:
    """A GPU whose tensor cores are slow goes sparsely where another goes densely."""
    stats = even(0.1)
    assert choose(stats, TOKENS, HIDDEN, SHAPE).name == "dense"
    assert choose(stats, TOKENS, HIDDEN, SHAPE, Costs(flop_per_us=30e6)).name == "gather"


def test_what_does_not_fit_shared_memory_is_not_chosen() -> None:
    torch.manual_seed(0)
    stats = TwellStatistics.of(torch.rand(64, 24576) < 0.002, 1024)
    route = choose(stats, TOKENS, HIDDEN, SHAPE, Costs(gathered_token_us=1e9))
    assert route.name == "hot_cold"
    assert 24576 - route.hot < 232448 // 16


def test_hot_neurons_come_first_and_the_others_fill_tiles_evenly() -> None:
    stats = skewed(0.03, 512)
    order = hot_first(stats, 576, 4)
    assert order.sort()[0].tolist() == list(range(INNER))
    busy = stats.neuron_counts[order]
    assert busy[:576].sum() > 0.85 * stats.nonzeros
    tiles = busy[576:].view(4, -1).sum(1).float()
    assert tiles.max() < 1.05 * tiles.min()


def test_a_route_that_contradicts_itself_is_refused() -> None:
    for name, hot in (("dense", 64), ("hot_cold", 0), ("hot_cold", 8), ("fast", 0)):
        with pytest.raises(ConfigError, match=f"route is '{name}'|{hot} hot neurons on route {name}"):
            Route(name, hot)  # type: ignore[arg-type]


def test_tiles_that_overflow_get_wider() -> None:
    route = Route("sliced", capacity=8)
    assert wider(route, 1, 4096) == route
    assert wider(route, 2, 4096) == Route("sliced", capacity=16)
    assert wider(Route("sliced", capacity=200), 2, 4096).capacity == MOST_CAPACITY
    assert wider(Route("sliced", capacity=1000), 2, 4096).capacity == 1000


def test_tiles_have_room_for_what_was_seen_and_a_quarter_more() -> None:
    active = torch.zeros(64, INNER, dtype=torch.bool)
    active[:, :20] = True
    active[0, 100:140] = True
    stats = TwellStatistics.of(active, 1408)
    assert choose(stats, TOKENS, HIDDEN, SHAPE, ONLY_SLICED).capacity == 60 * 5 // 4 // 4 * 4
    active[0, 100:1000] = True
    assert choose(TwellStatistics.of(active, 1408), TOKENS, HIDDEN, SHAPE, ONLY_SLICED).capacity == MOST_CAPACITY


def call(router: Router, tokens: int, fraction: float, frozen: bool = False) -> Route:
    """One call of a feed-forward on tokens of which this fraction is active: what SparseFFN does with its router."""
    route = router.next(tokens, frozen=frozen)
    if frozen:
        return route
    router.take_order()
    measured = router.measurement(CPU)
    if measured is not None:
        torch.manual_seed(1)
        measured.copy_(TwellStatistics.measure(torch.rand(tokens, INNER) < fraction, router.tile_columns))
    nonzeros = int(fraction * tokens * INNER)
    if route.name in ("sliced", "hot_cold"):
        totals[PACKED] += nonzeros
        totals[SLICED] += tokens
    router.sent(tokens, totals, measured)
    return route


totals = torch.zeros(4, dtype=torch.int32)


@pytest.fixture(autouse=True)
def fresh_totals() -> None:
    totals.zero_()


def test_the_first_call_is_dense_and_later_ones_follow_it() -> None:
    router = Router(SHAPE, HIDDEN, INNER, costs=Costs(launch_us=0.0, gathered_token_us=1e9))
    assert router.measured is None
    assert call(router, 512, 0.001).name == "dense"
    assert call(router, 512, 0.001).name == "sliced"
    found = router.measured
    assert found is not None
    assert (found.rows, found.route.name, found.overflowed_rows) == (512, "sliced", 0)
    assert found.nonzero_fraction == pytest.approx(0.001, rel=0.1)


def test_a_graph_keeps_what_was_known() -> None:
    """Nothing is read while it is captured, though a measurement has arrived."""
    router = Router(SHAPE, HIDDEN, INNER, costs=Costs(launch_us=0.0, gathered_token_us=1e9))
    assert call(router, 512, 0.001).name == "dense"
    assert call(router, 512, 0.001, frozen=True).name == "dense"
    assert call(router, 512, 0.001).name == "sliced"
    assert call(router, 512, 0.001, frozen=True).name == "sliced"


def test_tokens_unlike_those_measured_are_measured_again() -> None:
    router = Router(SHAPE, HIDDEN, INNER, costs=Costs(launch_us=0.0, gathered_token_us=1e9))
    names = [call(router, 512, fraction).name for fraction in (0.001, 0.001, 0.001, 0.3, 0.3, 0.3, 0.3)]
    assert names == ["dense", "sliced", "sliced", "sliced", "dense", "dense", "dense"]
    assert router.measured is not None
    assert router.measured.nonzero_fraction == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize("way", ["dense", "gather"])
def test_calls_that_pack_nothing_are_measured_now_and_then(way: str) -> None:
    cheap = (
        Costs(flop_per_us=1.0, memory_bytes_per_us=1.0)
        if way == "gather"
        else Costs(token_us=1e9, gathered_token_us=1e9)
    )
    router = Router(SHAPE, HIDDEN, INNER, costs=cheap)
    looked = []
    for _ in range(2 * MEASURE_EVERY + 3):
        router.next(4)
        measured = router.measurement(CPU)
        looked.append(measured is not None)
        if measured is not None:
            active = torch.zeros(4, INNER, dtype=torch.bool)
            active[:, :8] = True
            measured.copy_(TwellStatistics.measure(active, router.tile_columns))
        router.sent(4, totals, measured)
    assert [turn for turn, found in enumerate(looked) if found] == [0, MEASURE_EVERY + 1, 2 * MEASURE_EVERY + 2]
    assert router.measured is not None
    assert router.measured.route.name == way


def test_overflow_widens_the_tiles_of_later_calls() -> None:
    router = Router(SHAPE, HIDDEN, INNER, costs=Costs(launch_us=0.0, gathered_token_us=1e9))
    call(router, 512, 0.001)
    before = router.next(512)
    totals[OVERFLOWED] += 100
    totals[GATHERED] += 100
    totals[SLICED] += 512
    router.sent(512, totals, None)
    assert router.next(512).capacity == 2 * before.capacity
    assert router.measured is not None
    assert router.measured.overflowed_rows == 100


def test_sums_that_wrap_around_are_read_rightly() -> None:
    router = Router(SHAPE, HIDDEN, INNER, costs=Costs(launch_us=0.0, gathered_token_us=1e9))
    call(router, 512, 0.001)
    route = router.next(512)
    many = 2**27
    for _ in range(4):
        totals[PACKED] += int(0.001 * many * INNER)
        totals[SLICED] += many
        router.sent(many, totals, None)
        router.next(512)
    assert totals[PACKED] < 2**31 - 1 < 4 * 0.001 * many * INNER
    assert router.next(512) == route


def test_a_forced_way_is_kept() -> None:
    forced = Route("hot_cold", hot=64)
    router = Router(SHAPE, HIDDEN, INNER, forced=forced)
    assert [call(router, 512, fraction) for fraction in (0.001, 0.5, 0.5)] == [forced] * 3
    assert router.take_order() is None


def test_a_letter_is_taken_once_and_the_last_one_counts() -> None:
    mailbox = Mailbox()
    assert mailbox.take() is None
    assert mailbox.send(torch.tensor([1]))
    assert mailbox.send(torch.tensor([2]))
    assert mailbox.take() == torch.tensor([2])
    assert mailbox.take() is None
