"""TwELL loses nothing: whatever the rows hold and whatever the capacity."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from onekernel.errors import ConfigError
from onekernel.weights.twell import Twell, TwellStatistics, gated_product


def sparse(rows: int, columns: int, fraction: float, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=draw).abs().bfloat16() + 0.01
    return values * (torch.rand(rows, columns, generator=draw) < fraction)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@given(
    rows=st.integers(0, 9),
    columns=st.integers(1, 600),
    tile_columns=st.sampled_from([1, 8, 100, 256]),
    capacity=st.integers(1, 256),
    fraction=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_what_is_packed_comes_back(
    rows: int, columns: int, tile_columns: int, capacity: int, fraction: float, seed: int
) -> None:
    values = sparse(rows, columns, fraction, seed)
    packed = Twell.pack(values, min(capacity, tile_columns), tile_columns)
    assert torch.equal(packed.unpack(), values)
    entries = packed.entries()
    assert len(entries.rows) == int((values != 0).sum())
    assert torch.equal(entries.rows * columns + entries.columns, values.flatten().nonzero().flatten())


@pytest.mark.parametrize("capacity", [1, 4, 31, 32, 255, 256])
def test_rows_at_and_just_over_the_capacity(capacity: int) -> None:
    """Empty, exactly full, one more than fits, and all columns; only what does not fit is in the overflow area."""
    values = torch.zeros(4, 600, dtype=torch.bfloat16)
    values[1, 256 : 256 + capacity] = 1.5
    values[2, 255 : 256 + capacity + 1] = 2.5  # the last column of a tile, and one too many in the next
    values[3] = 3.5
    packed = Twell.pack(values, capacity)
    assert torch.equal(packed.unpack(), values)
    over = [] if capacity == 256 else [2, 3]
    assert packed.overflow_rows.tolist() == over
    assert packed.counts[0].tolist() == [0, 0, 0]
    assert packed.counts[1].tolist() == [0, capacity, 0]


def test_a_word_is_column_and_value() -> None:
    values = torch.zeros(1, 300, dtype=torch.bfloat16)
    values[0, 299], values[0, 7], values[0, 8] = -2.0, float("inf"), float("nan")
    packed = Twell.pack(values, 4)
    assert packed.counts.tolist() == [[2, 1]]
    words = [int(packed.words[0, tile, 0]) & 0xFFFFFFFF for tile in range(2)]
    assert [hex(word) for word in words] == ["0x7f800007", "0xc000012b"]
    assert packed.unpack()[0, 8].isnan()


def test_statistics() -> None:
    values = torch.zeros(5, 600, dtype=torch.bfloat16)
    values[1, :3], values[2, 255:262], values[4] = 1.0, 1.0, 1.0
    found = TwellStatistics.of(values)
    assert (found.rows, found.columns, found.nonzeros, found.fullest_row) == (5, 600, 610, 600)
    assert found.peaks.nonzero().flatten().tolist() == [0, 3, 6, 256]
    assert found.peaks[0] == 2
    assert found.neuron_counts[[0, 100, 256]].tolist() == [2, 1, 2]
    assert found.nonzero_fraction == 610 / 3000


@pytest.mark.parametrize(("share", "capacity"), [(0.0, 256), (0.2, 8), (0.4, 4), (1.0, 4)])
def test_the_capacity_follows_from_the_fullest_tiles(share: float, capacity: int) -> None:
    values = torch.zeros(5, 600, dtype=torch.bfloat16)
    values[1, :3], values[2, 255:262], values[4] = 1.0, 1.0, 1.0
    found = TwellStatistics.of(values).capacity(share)
    assert found == capacity
    assert len(Twell.pack(values, found).overflow_rows) <= share * 5


def test_no_rows_at_all() -> None:
    values = torch.zeros(0, 300, dtype=torch.bfloat16)
    assert TwellStatistics.of(values).nonzero_fraction == 0
    assert Twell.pack(values, TwellStatistics.of(values).capacity()).unpack().shape == (0, 300)


@pytest.mark.parametrize("shape", [(3, 0), (8,)])
def test_statistics_of_no_columns_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"the activation has shape .*; it must be \(rows, 1 or more columns\)"):
        TwellStatistics.of(torch.zeros(shape))


@pytest.mark.parametrize("capacity", [1, 16, 256])
@pytest.mark.parametrize("square", [False, True])
def test_the_product_is_the_dense_one(capacity: int, square: bool) -> None:
    """In float32 weights nothing is rounded, so only the order of sums differs."""
    torch.manual_seed(0)
    gate = sparse(40, 700, 0.05)
    gate[0] = 1.0
    x, up, down = torch.randn(40, 24), torch.randn(700, 24), torch.randn(700, 24)

    def activate(values: torch.Tensor) -> torch.Tensor:
        return F.relu(values).square() if square else F.relu(values)

    packed = Twell.pack(gate, capacity)
    want = activate(gate.double()) * (x.double() @ up.double().T)
    got = gated_product(packed, x, up, down, activate)
    assert error(got, want @ down.double()) < 1e-6
    plain = gated_product(packed, None, None, down, activate)
    assert error(plain, activate(gate.double()) @ down.double()) < 1e-6


@pytest.mark.parametrize(
    ("values", "capacity", "complaint"),
    [
        (torch.zeros(8, dtype=torch.bfloat16), 4, r"has shape \(8,\); it must be \(rows, columns\)"),
        (torch.zeros(1, 8), 4, "torch.float32; TwELL words hold bfloat16"),
        (torch.zeros(1, 65537, dtype=torch.bfloat16), 4, "65537 columns; a TwELL word can name 65536"),
        (torch.zeros(1, 8, dtype=torch.bfloat16), 0, "capacity is 0; it must be 1 to the 256"),
        (torch.zeros(1, 8, dtype=torch.bfloat16), 257, "capacity is 257"),
    ],
)
def test_what_does_not_fit_the_format_is_refused(values: torch.Tensor, capacity: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Twell.pack(values, capacity)
