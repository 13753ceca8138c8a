"""Who has which page of the KV cache: a sequence, the prefix cache, or nobody."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from onekernel.config import PAGE_TOKENS
from onekernel.engine.memory import pages_for
from onekernel.engine.prefix_cache import CachedPage, PrefixCache
from onekernel.engine.status import CacheUse
from onekernel.errors import MemoryLimitError


@dataclass(slots=True)
class Lease:
    """The pages of one sequence, the first `reused` of which came from the prefix cache and must not be written."""

    table: torch.Tensor  # (pages,) int64 on the CPU
    reused: int = 0
    shared: list[CachedPage] = field(default_factory=list)
    """What of the sequence is in the prefix cache, which this lease holds there."""

    @property
    def cached_tokens(self) -> int:
        """Positions whose keys and values were there at the beginning."""
        return self.reused * PAGE_TOKENS


class PagePool:
    """All pages. Free ones are given lowest first, so that a lone sequence lies in one piece.

    With `reuse`, whole pages stay in the prefix cache when their sequence ends. They are given away, the least
    recently used first, as soon as there are no free ones: a cached page never stands in a request's way.
    """

    def __init__(self, num_pages: int, page_bytes: int, *, reuse: bool = False) -> None:
        self.num_pages = num_pages
        self._page_bytes = page_bytes
        self._reuse = reuse
        self._free = list(range(num_pages - 1, -1, -1))
        self._cache = PrefixCache()
        self._hit_tokens = 0
        self._query_tokens = 0

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds, cached ones included."""
        return len(self._free) + self._cache.idle_pages

    @property
    def use(self) -> CacheUse:
        """How full the cache is; queries count what could have been found, the prompts' whole pages."""
        cached = self._cache.idle_pages
        used = self.num_pages - len(self._free) - cached
        return CacheUse(used, cached, self.num_pages, self._hit_tokens, self._query_tokens)

    def has_room(self, prompt: Sequence[int], total_tokens: int) -> bool:
        """Return whether `take` would succeed now; raises MemoryLimitError if it never could."""
        if pages_for(total_tokens) > self.num_pages:
            raise self._too_many(total_tokens)
        return self._lacking(self._find(prompt), total_tokens) <= 0

    def take(self, prompt: Sequence[int], total_tokens: int, *, reuse: bool = True) -> Lease:
        """Return pages for a prompt that grows to `total_tokens`; raises MemoryLimitError if there are too few now.

        What the prefix cache holds of the prompt comes first; the last prompt token is never part of that, because
        decode starts with it.
        """
        found = self._find(prompt) if reuse else []
        if self._lacking(found, total_tokens) > 0:
            raise self._too_many(total_tokens)
        self._cache.hold(found)
        fresh = [self._take_one() for _ in range(pages_for(total_tokens) - len(found))]
        if reuse and self._reuse:
            self._query_tokens += (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS
            self._hit_tokens += len(found) * PAGE_TOKENS
        table = torch.tensor([page.page for page in found] + fresh, dtype=torch.int64)
        return Lease(table, len(found), found)

    def share(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Let others find the whole pages of these tokens, all of whose keys and values are there."""
        if self._reuse:
            self._cache.extend(lease.shared, tokens, lease.table.tolist())

    def give(self, lease: Lease) -> None:
        """Take pages back; those that were shared stay in the prefix cache."""
        shared = {page.page for page in lease.shared}
        self._cache.drop(lease.shared)
        self._add_free(page for page in lease.table.tolist() if page not in shared)

    def destroy(self, lease: Lease) -> None:
        """Take pages back of a sequence that failed: nobody shall find what it computed."""
        own = {page.page for page in lease.shared}
        removed = self._cache.forget(lease.shared[lease.reused :])
        self._cache.drop(lease.shared[: lease.reused])
        self._add_free([*removed, *(page for page in lease.table.tolist() if page not in own)])

    def _find(self, prompt: Sequence[int]) -> list[CachedPage]:
        return self._cache.find(prompt[:-1]) if self._reuse else []

    def _lacking(self, found: list[CachedPage], total_tokens: int) -> int:
        """Return how many pages are missing once those found are held."""
        fresh = pages_for(total_tokens) - len(found)
        return fresh - (self.free_pages - self._cache.idle_among(found))

    def _take_one(self) -> int:
        return self._free.pop() if self._free else self._cache.evict()

    def _add_free(self, pages: Iterable[int]) -> None:
        self._free.extend(pages)
        self._free.sort(reverse=True)

    def _too_many(self, total_tokens: int) -> MemoryLimitError:
        count = pages_for(total_tokens)
        advice = (
            "wait for another request to end or ask for a shorter answer"
            if count <= self.num_pages
            else f"start with --kv-tokens {count * PAGE_TOKENS} or more, or ask for a shorter answer"
        )
        return MemoryLimitError(
            f"{total_tokens} tokens take {count} pages; {self.free_pages} of the KV cache's {self.num_pages} are free: "
            f"{advice}",
            count * self._page_bytes,
            self.free_pages * self._page_bytes,
            self.num_pages * PAGE_TOKENS,
        )
