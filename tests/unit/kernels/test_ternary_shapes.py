"""Which build of a ternary kernel is launched: it fits every GPU, and fills the one it is for."""

from __future__ import annotations

import pytest

from onekernel.kernels.ternary.prefill import CANDIDATES, choose_prefill
from onekernel.kernels.ternary.product import SHARED_BYTES, choose_product, variants
from onekernel.kernels.ternary.wgmma import choose_wgmma, wgmma_shapes

SHAPES = [(n, k) for k, ns in {2560: (2560, 3840, 13824), 6912: (2560,), 3200: (3200, 4800, 20480)}.items() for n in ns]
EXTREMES = [(1, 1), (16, 131_072), (151_936, 4096), (4096, 12_288)]


@pytest.mark.parametrize(("n", "k"), [*SHAPES, *EXTREMES])
@pytest.mark.parametrize("layout", ["tensor_core", "blocks16x32"])
@pytest.mark.parametrize("group", [0, 64])
def test_a_build_fits_the_smallest_gpu(n: int, k: int, layout: str, group: int) -> None:
    strips, units = -(-n // 16), -(-k // 128)
    for tokens in range(1, 9):
        shape = choose_product(layout, strips, units, tokens, group=group)
        assert shape.tokens >= tokens or group
        assert shape.grid(strips, tokens) * (shape.warps // shape.split) >= strips
        if not group or k <= 65_536:
            assert shape.shared_bytes(units) <= SHARED_BYTES


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_one_wave_fills_every_sm(n: int, k: int) -> None:
    """With at least eight warps an SM on average, and no more CTAs than are resident at once."""
    strips, units = n // 16, k // 128
    shape = choose_product("tensor_core", strips, units, 1)
    ctas = shape.grid(strips, 1)
    resident = min(65_536 // (64 * shape.threads), 227 * 1024 // shape.shared_bytes(units))
    assert ctas * shape.warps >= 8 * 132
    assert ctas <= 132 * resident


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_variants_are_different_builds_that_fit(n: int, k: int) -> None:
    strips, units = n // 16, k // 128
    found = variants("tensor_core", strips, units, 1)
    assert choose_product("tensor_core", strips, units, 1) in found
    assert 3 <= len(found) == len(set(found)) <= 8
    assert all(shape.shared_bytes(units) <= SHARED_BYTES for shape in found)


@pytest.mark.parametrize("tokens", [17, 64, 512, 4096])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_prefill_tiles_cover_all(n: int, k: int, tokens: int) -> None:
    shape = choose_prefill(n // 16, tokens)
    assert shape in CANDIDATES
    assert shape.grid(n // 16, tokens) * shape.strips * 16 * shape.tokens >= n * tokens
    assert shape.shared_bytes(k // 128) <= SHARED_BYTES


def test_many_tokens_take_a_large_tile_and_few_a_smaller_one() -> None:
    assert choose_prefill(864, 4096) == CANDIDATES[1]
    assert choose_prefill(160, 32).tokens == 32
    assert choose_prefill(160, 512, group=64).group == 64


@pytest.mark.parametrize("tokens", [33, 64, 512, 4096])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_wgmma_tiles_cover_all(n: int, k: int, tokens: int) -> None:
    shape = choose_wgmma(n // 16, tokens)
    assert shape in wgmma_shapes()
    assert shape.grid(n // 16, tokens) * shape.rows * shape.tokens >= n * tokens
    assert shape.shared_bytes(k // 128) * shape.ctas <= 227 * 1024
