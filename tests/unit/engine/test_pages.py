"""Pages and the prefix cache: who holds what, what is found, what is evicted; also under random use."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onekernel.config import PAGE_TOKENS
from onekernel.engine.pages import Lease, PagePool
from onekernel.errors import MemoryLimitError


def ids(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000) for _ in range(count)]


def run(pool: PagePool, tokens: list[int], total: int | None = None) -> Lease:
    """A sequence that comes, computes all its tokens and goes."""
    lease = pool.take(tokens, total or len(tokens))
    pool.share(lease, tokens)
    pool.give(lease)
    return lease


def test_whole_pages_but_never_the_last_token_come_from_the_cache() -> None:
    pool = PagePool(100, 1, reuse=True)
    text = ids(5 * PAGE_TOKENS)
    first = run(pool, text)
    assert first.reused == 0
    for length, pages in [(10, 0), (64, 0), (65, 1), (128, 1), (129, 2), (5 * PAGE_TOKENS, 4)]:
        lease = pool.take(text[:length], length)
        assert (lease.reused, lease.cached_tokens) == (pages, pages * PAGE_TOKENS)
        assert lease.table[:pages].tolist() == first.table[:pages].tolist()
        pool.give(lease)
    other = [*text[:100], text[100] + 1, *text[101:]]
    assert run(pool, other).reused == 1


def test_without_reuse_nothing_is_kept() -> None:
    pool = PagePool(10, 1)
    text = ids(200)
    assert run(pool, text).reused == run(pool, text).reused == 0
    assert pool.use.pages_cached == pool.use.query_tokens == 0


def test_counts_of_hits_and_pages() -> None:
    pool = PagePool(20, 1, reuse=True)
    text = ids(300)
    run(pool, text)
    lease = pool.take(text, 400)
    use = pool.use
    assert (use.pages_used, use.pages_cached, use.pages_total) == (7, 0, 20)
    assert (use.hit_tokens, use.query_tokens) == (256, 512)
    pool.give(lease)
    assert (pool.use.pages_used, pool.use.pages_cached, pool.free_pages) == (0, 4, 20)


def test_a_sequence_finds_what_another_one_that_still_runs_has_shared() -> None:
    pool = PagePool(20, 1, reuse=True)
    text = ids(300)
    first = pool.take(text, 400)
    pool.share(first, text[:299])
    second = pool.take(text, 400)
    assert second.reused == 4
    assert second.table[:4].tolist() == first.table[:4].tolist()
    assert not set(second.table[4:].tolist()) & set(first.table.tolist())
    pool.give(first)
    assert pool.use.pages_used == 7  # the second one's
    pool.give(second)
    assert pool.free_pages == 20


def test_two_that_compute_the_same_at_once_leave_one_copy() -> None:
    pool = PagePool(20, 1, reuse=True)
    text = ids(128)
    leases = [pool.take(text, 128) for _ in range(2)]
    for lease in leases:
        pool.share(lease, text)
        pool.give(lease)
    assert pool.use.pages_cached == 2 and pool.free_pages == 20


def test_the_least_recently_used_pages_are_evicted_ends_first() -> None:
    pool = PagePool(8, 1, reuse=True)
    old, new = ids(4 * PAGE_TOKENS, 1), ids(4 * PAGE_TOKENS, 2)
    run(pool, old)
    run(pool, new)
    big = pool.take(ids(10, 3), 3 * PAGE_TOKENS)  # takes three pages of `old`, from its end
    assert pool.has_room(old, 5 * PAGE_TOKENS) and not pool.has_room(old, 6 * PAGE_TOKENS)
    pool.give(big)
    assert pool.take(old, 4 * PAGE_TOKENS).reused == 1
    assert pool.take(new, 4 * PAGE_TOKENS).reused == 3


def test_cached_pages_never_stand_in_the_way_of_a_request() -> None:
    pool = PagePool(8, 1, reuse=True)
    run(pool, ids(8 * PAGE_TOKENS))
    assert pool.use.pages_cached == 8
    assert len(pool.take(ids(10, 1), 8 * PAGE_TOKENS).table) == 8


def test_pages_that_are_held_are_not_evicted() -> None:
    pool = PagePool(8, 1, reuse=True)
    text = ids(4 * PAGE_TOKENS)
    run(pool, text)
    held = pool.take(text, 5 * PAGE_TOKENS)
    assert not pool.has_room(ids(5, 1), 4 * PAGE_TOKENS) and pool.has_room(ids(5, 1), 3 * PAGE_TOKENS)
    other = pool.take(ids(5, 1), 3 * PAGE_TOKENS)
    assert not set(other.table.tolist()) & set(held.table.tolist())


def test_a_failed_sequence_leaves_nothing_to_find() -> None:
    pool = PagePool(8, 1, reuse=True)
    text = ids(4 * PAGE_TOKENS)
    run(pool, text[:64])
    lease = pool.take(text, len(text))
    pool.share(lease, text)
    pool.destroy(lease)
    assert pool.free_pages == 8 and pool.use.pages_cached == 1  # the one that was there before
    assert pool.take(text, len(text)).reused == 1


def test_too_many_pages_are_refused_with_numbers() -> None:
    pool = PagePool(4, 1000, reuse=True)
    with pytest.raises(
        MemoryLimitError, match=r"300 tokens take 5 pages; 4 of the KV cache's 4.*--kv-tokens 320"
    ) as no:
        pool.has_room([1], 300)
    assert (no.value.needed_bytes, no.value.free_bytes, no.value.largest_context) == (5000, 4000, 256)
    pool.take([1], 100)
    assert not pool.has_room([1], 200)
    with pytest.raises(MemoryLimitError, match="4 pages; 2 of the KV cache's 4 are free: wait"):
        pool.take([1], 200)


@dataclass
class Owner:
    """A sequence as a random user sees it, and a memory that says what is written where."""

    tokens: list[int]
    lease: Lease
    done: int = field(default=0)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), pages=st.integers(4, 24))
def test_random_use_never_mixes_sequences_and_loses_no_page(seed: int, pages: int) -> None:
    """Few different texts, so that prefixes are often shared, evicted and computed anew."""
    draw = random.Random(seed)
    pool = PagePool(pages, 1, reuse=True)
    memory: dict[int, tuple[int, ...]] = {}  # page -> the prefix whose last page it holds
    owners: list[Owner] = []

    def prefix(tokens: list[int], page: int) -> tuple[int, ...]:
        return tuple(tokens[: (page + 1) * PAGE_TOKENS])

    for _ in range(150):
        for owner in owners:  # nobody's pages were overwritten
            for page in range(owner.done // PAGE_TOKENS):
                assert memory[int(owner.lease.table[page])] == prefix(owner.tokens, page)
        action = draw.random()
        if action < 0.4:
            tokens = [draw.randrange(2)] * PAGE_TOKENS * draw.randint(0, 3) + [draw.randrange(3)] * draw.randint(1, 150)
            total = len(tokens) + draw.randint(1, 100)
            if -(-total // PAGE_TOKENS) > pages or not pool.has_room(tokens, total):
                continue
            lease = pool.take(tokens, total)
            owner = Owner(tokens + [draw.randrange(3) for _ in range(total - len(tokens))], lease, lease.cached_tokens)
            assert owner.done < len(tokens)
            owners.append(owner)
        elif owners:
            owner = draw.choice(owners)
            before = owner.done
            owner.done = draw.randint(owner.done, len(owner.tokens))
            for page in range(before // PAGE_TOKENS, -(-owner.done // PAGE_TOKENS)):
                memory[int(owner.lease.table[page])] = prefix(owner.tokens, page)
            if action < 0.6:
                pool.share(owner.lease, owner.tokens[: owner.done])
            elif action < 0.9:
                owners.remove(owner)
                pool.share(owner.lease, owner.tokens[: owner.done])
                pool.give(owner.lease)
            else:
                owners.remove(owner)
                pool.destroy(owner.lease)
        held = {page for owner in owners for page in owner.lease.table.tolist()}
        assert pool.use.pages_used >= len(held)
        assert pool.use.pages_used + pool.free_pages == pages
    for owner in owners:
        pool.give(owner.lease)
    assert pool.free_pages == pages
    assert len(pool.take([1], pages * PAGE_TOKENS).table.unique()) == pages
