"""Every block of a cache belongs to one member, whatever the length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onekernel.config import PAGE_TOKENS
from onekernel.plan.chunks import block_pages_after, blocks, chunks, members_of, owner, piece_tokens

MEMBERS, PAGES = st.integers(1, 132), st.integers(1, 8)


@given(st.integers(1, 200_000), MEMBERS, PAGES)
def test_the_members_that_own_blocks_are_the_chunks(length: int, members: int, block_pages: int) -> None:
    count = blocks(length, block_pages)
    assert {owner(block, members) for block in range(count)} == set(range(chunks(length, members, block_pages)))
    assert (count - 1) * PAGE_TOKENS * block_pages < length <= count * PAGE_TOKENS * block_pages


@given(st.integers(1, 100_000), MEMBERS, PAGES)
def test_a_longer_text_takes_no_block_from_its_owner(length: int, members: int, block_pages: int) -> None:
    """The kernel's form: the remainder by the number of chunks, which grows, tells the same owner at every length."""
    last = blocks(length, block_pages) - 1
    assert last % chunks(length, members, block_pages) == owner(last, members)
    assert chunks(length + 1, members, block_pages) - chunks(length, members, block_pages) in (0, 1)


@given(st.integers(1, 200), st.integers(1, 200))
def test_members_fit_the_ctas(ctas: int, kv_heads: int) -> None:
    members = members_of(ctas, kv_heads)
    assert members >= 1 and (members == 1 or members * kv_heads <= ctas < (members + 1) * kv_heads)


@pytest.mark.parametrize(("head_dim", "pages"), [(64, 8), (128, 4), (80, 4), (256, 2)])
def test_one_member_attends_to_a_short_prompt_and_all_share_a_long_one(head_dim: int, pages: int) -> None:
    most, piece = pages * PAGE_TOKENS - 64, piece_tokens(head_dim, 16384)
    assert block_pages_after(1, piece, 16) == block_pages_after(most - 1, piece, 16) == pages
    assert block_pages_after(most, piece, 16) == block_pages_after(4095, piece, 16) == 1
    assert block_pages_after(4096, piece, 16) == (4 if piece == PAGE_TOKENS else 1)
    assert chunks(most + 64, 16, pages) == 1


@pytest.mark.parametrize(("head_dim", "tokens"), [(64, 64), (80, 32), (100, 32), (128, 32), (256, 16)])
def test_a_piece_fits_a_stage(head_dim: int, tokens: int) -> None:
    assert piece_tokens(head_dim, 16384) == tokens
