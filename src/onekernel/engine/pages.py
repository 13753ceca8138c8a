"""Which pages of the KV cache are free."""

from __future__ import annotations

import torch

from onekernel.errors import MemoryLimitError


class PageAllocator:
    """A free list of page numbers; lowest first, so that a lone sequence lies in one piece."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        self.num_pages = num_pages
        self._page_bytes = page_bytes
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    def take(self, count: int) -> torch.Tensor:
        """Return `count` page numbers, (count,) int64 on the CPU; raises MemoryLimitError if there are too few."""
        if count > len(self._free):
            raise MemoryLimitError(
                f"the KV cache has {len(self._free)} free pages of {self.num_pages} and {count} are needed; "
                "wait for another request to end or ask for a shorter answer",
                count * self._page_bytes,
                len(self._free) * self._page_bytes,
                0,
            )
        taken = [self._free.pop() for _ in range(count)]
        return torch.tensor(taken, dtype=torch.int64)

    def give(self, pages: torch.Tensor) -> None:
        """Return pages to the free list."""
        self._free.extend(pages.tolist())
        self._free.sort(reverse=True)
