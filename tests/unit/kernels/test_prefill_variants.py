"""Which tile a product of the prefill takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onekernel.kernels.prefill.variants import VARIANTS, choose

H200_SMS = 132
LLAMA_1B_ROWS = (3072, 2048, 16384)


@given(tokens=st.integers(1, 4096), rows=st.integers(8, 32768), sms=st.integers(1, 200))
def test_the_ctas_cover_the_product(tokens: int, rows: int, sms: int) -> None:
    variant = choose(tokens, rows, sms)
    ctas = variant.ctas(tokens, rows)
    assert ctas * variant.tokens * variant.rows >= tokens * rows
    assert (ctas - 1) * variant.tokens * variant.rows < (tokens + variant.tokens) * (rows + variant.rows)


@pytest.mark.parametrize("rows", LLAMA_1B_ROWS)
def test_a_few_tokens_take_small_tiles_and_many_take_large_ones(rows: int) -> None:
    assert choose(16, rows, H200_SMS).tokens == 16
    assert choose(64, rows, H200_SMS).tokens in (32, 64)
    assert choose(2048, rows, H200_SMS).tokens == 128


def test_a_faster_variant_is_taken() -> None:
    """What a benchmark measured decides."""
    slow = [replace(variant, ns_per_unit=1e6) for variant in VARIANTS]
    for index, variant in enumerate(VARIANTS):
        fast = replace(variant, ns_per_unit=1.0)
        assert choose(512, 4096, H200_SMS, [*slow[:index], fast, *slow[index + 1 :]]) == fast


def test_names_differ() -> None:
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
    assert all(variant.tokens % (16 * variant.warps_m) == 0 for variant in VARIANTS)
    assert all(variant.rows % (8 * variant.warps_n) == 0 for variant in VARIANTS)


def test_what_a_variant_needs_fits_an_h200() -> None:
    """228 KiB an SM, of which the system takes one for each CTA, and 227 KiB a CTA."""
    for variant in VARIANTS:
        assert (variant.shared_bytes + 1024) * variant.ctas_per_sm <= 228 * 1024
        assert variant.shared_bytes <= 227 * 1024
