"""Packing a matrix for the tensor cores loses nothing and adds nothing but zeros."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from onekernel.weights.dense import PackedDense


@given(st.integers(1, 41), st.integers(1, 300), st.sampled_from([4, 8]), st.integers(0, 2**31))
def test_unpack_undoes_pack(rows: int, columns: int, tile_rows: int, seed: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()
    packed = PackedDense.pack(weight, tile_rows)
    assert torch.equal(packed.unpack(), weight)
    assert torch.count_nonzero(packed.tiles) == torch.count_nonzero(weight)
    assert packed.tiles.shape == (-(-rows // tile_rows), -(-columns * tile_rows // 512), 512)


@given(st.integers(1, 20), st.integers(1, 200), st.sampled_from([4, 8]))
def test_packing_in_place_overwrites_all_of_it(rows: int, columns: int, tile_rows: int) -> None:
    weight = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    expected = PackedDense.pack(weight, tile_rows).tiles
    given_tiles = torch.full((expected.shape[0] + 2, *expected.shape[1:]), torch.nan, dtype=torch.bfloat16)
    packed = PackedDense.pack(weight, tile_rows, given_tiles)
    assert torch.equal(given_tiles[:-2], expected) and not given_tiles[-2:].any()
    assert torch.equal(packed.unpack(), weight.bfloat16())


@given(st.integers(0, 7), st.integers(0, 63))
def test_the_place_of_a_value_in_a_unit(row: int, column: int) -> None:
    weight = torch.zeros(8, 64)
    weight[row, column] = 1
    unit = PackedDense.pack(weight).tiles.view(2, 8, 4, 8)
    assert unit[column % 16 // 8, row, column // 16, column % 8] == 1
