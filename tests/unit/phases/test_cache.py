"""The paged cache: what is appended comes back, and where a row keeps it."""

from __future__ import annotations

import pytest
import torch

from onekernel.phases.attention.cache import KVCache, places

TABLE = torch.tensor([2, 0, 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
@pytest.mark.parametrize("plain", [False, True])
def test_what_is_appended_comes_back(dtype: torch.dtype, head_dim: int, plain: bool) -> None:
    """In pieces of many tokens and of one, over several pages; other slots stay as they were."""
    both = torch.randn(2, 150, 2, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    cache = KVCache(torch.full((1, 3, 2, 2, 64, head_dim), torch.nan, dtype=dtype), plain)
    for start, end in ((0, 1), (1, 2), (2, 70), (70, 71), (71, 150)):
        cache.append(0, TABLE, start, *both[:, start:end])
    assert torch.equal(torch.stack(cache.read(0, TABLE, 150)), both.transpose(1, 2))
    assert int(cache.pages.isnan().sum()) == (192 - 150) * 2 * 2 * head_dim


def test_where_a_row_keeps_its_chunks() -> None:
    """Chunk c of token t at place c ^ t % 8, in heads of whole 64 values; kernels/tile/page.cuh has the same rule."""
    for head_dim, turns in ((128, True), (64, True), (96, False)):
        cache = KVCache(torch.zeros(1, 1, 1, 2, 64, head_dim))
        row = torch.arange(head_dim, dtype=torch.float32)
        for token in (0, 5, 13, 63):
            cache.append(0, torch.zeros(1, dtype=torch.int64), token, row.expand(1, 1, -1), -row.expand(1, 1, -1))
            chunks = [chunk ^ token % 8 if turns else chunk for chunk in range(head_dim // 8)]
            wanted = torch.tensor([8 * chunk + i for chunk in chunks for i in range(8)], dtype=torch.float32)
            assert torch.equal(cache.pages[0, 0, 0, 0, token], wanted)
            assert torch.equal(cache.pages[0, 0, 0, 1, token], -wanted)
            assert torch.equal(places(head_dim)[token].float(), wanted)
