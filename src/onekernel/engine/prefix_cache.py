"""Pages that ended requests left behind, found by the tokens that they hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onekernel.config import PAGE_TOKENS

_ROOT = 0

Key = tuple[int, tuple[int, ...]]
"""The number of the page before, and a page's own tokens: together they stand for the whole prefix."""


@dataclass(slots=True, eq=False)
class CachedPage:
    """A whole page of keys and values. It is never written again, and stays while somebody holds it."""

    page: int
    number: int
    key: Key
    holders: int = 0


class PrefixCache:
    """A tree of pages: each is a child of the page before it. Whoever holds a page holds those before it.

    Nothing of a sequence but its tokens says what its pages hold, so equal prefixes share them, whoever asked.
    """

    def __init__(self) -> None:
        self._pages: dict[Key, CachedPage] = {}
        self._idle: OrderedDict[int, CachedPage] = OrderedDict()  # least recently used first
        self._numbers = _ROOT

    @property
    def idle_pages(self) -> int:
        """Pages that nobody holds: they can be evicted."""
        return len(self._idle)

    def find(self, tokens: Sequence[int]) -> list[CachedPage]:
        """Return the pages that hold the beginning of `tokens`, in order."""
        found: list[CachedPage] = []
        for start in range(0, len(tokens) - PAGE_TOKENS + 1, PAGE_TOKENS):
            page = self._pages.get(_key(found, tokens[start : start + PAGE_TOKENS]))
            if page is None:
                break
            found.append(page)
        return found

    def idle_among(self, pages: Iterable[CachedPage]) -> int:
        """Return how many of these pages nobody holds."""
        return sum(page.holders == 0 for page in pages)

    def hold(self, pages: Iterable[CachedPage]) -> None:
        """Keep pages from being evicted, until `drop`."""
        for page in pages:
            page.holders += 1
            self._idle.pop(page.number, None)

    def extend(self, held: list[CachedPage], tokens: Sequence[int], table: Sequence[int]) -> None:
        """Put the whole pages of `tokens`, which lie in the pages of `table`, behind those `held`, and hold them too.

        Where an equal page is cached already, that one is held and the one of the table stays the caller's.
        """
        for index in range(len(held), len(tokens) // PAGE_TOKENS):
            key = _key(held, tokens[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS])
            page = self._pages.get(key)
            if page is None:
                self._numbers += 1
                page = self._pages[key] = CachedPage(table[index], self._numbers, key)
            self.hold((page,))
            held.append(page)

    def drop(self, pages: Sequence[CachedPage]) -> None:
        """Let pages go that were held, in order from the first of the sequence."""
        # The last one first, so that a page is never used less recently than those behind it: the least recently used
        # page is always a leaf of the tree.
        for page in reversed(pages):
            page.holders -= 1
            if page.holders == 0:
                self._idle[page.number] = page

    def forget(self, pages: Sequence[CachedPage]) -> list[int]:
        """Let pages go like `drop`, and remove those that nobody else holds; return their page numbers."""
        removed = []
        for page in reversed(pages):
            page.holders -= 1
            if page.holders == 0:
                del self._pages[page.key]
                removed.append(page.page)
        return removed

    def evict(self) -> int:
        """Remove the page that was used least recently of those nobody holds, and return its number."""
        _, page = self._idle.popitem(last=False)
        del self._pages[page.key]
        return page.page


def _key(before: Sequence[CachedPage], tokens: Sequence[int]) -> Key:
    return before[-1].number if before else _ROOT, tuple(tokens)
