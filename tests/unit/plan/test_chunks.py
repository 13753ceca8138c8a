"""Every block of a cache belongs to one member, whatever the length."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onekernel.config import PAGE_TOKENS
from onekernel.plan.chunks import blocks, chunks, members_of, owner

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
