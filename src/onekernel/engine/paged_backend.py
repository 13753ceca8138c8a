"""What backends share: sequences in a paged cache, prefill by the model's phases, and choosing token by token."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import torch

from onekernel.config import PAGE_TOKENS, PREFILL_CHUNK_TOKENS, Sampling
from onekernel.engine.backend import DecodedToken, MemoryReport, SequenceState, never
from onekernel.engine.pages import PageAllocator
from onekernel.engine.request import CancelToken
from onekernel.engine.status import CacheUse
from onekernel.models.model import Model, Place
from onekernel.phases.attention.cache import KVCache
from onekernel.phases.attention.rope import rope_table
from onekernel.phases.choose.reference import TokenCounts, choose


@dataclass(slots=True)
class PagedSequence:
    """Tokens so far, the pages they own, and how many of them are in the cache."""

    tokens: list[int]
    prompt_tokens: int
    page_table: torch.Tensor
    rope: torch.Tensor
    length: int = field(default=0)

    def add(self, token_id: int) -> None:
        """Take a token that was chosen after the last one had been appended to the cache."""
        self.tokens.append(token_id)
        self.length += 1


class PagedBackend:
    """A model and its cache. `vocab_limit`: ids from there on are padding and never chosen.

    rope: `rope_table`'s for `max_context` tokens, on the model's device.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        rope: torch.Tensor,
        *,
        max_context: int,
        vocab_limit: int,
        memory: MemoryReport,
    ) -> None:
        self.model = model
        self.config = model.config
        self.device = str(model.device)
        self.max_context = max_context
        self.memory = memory
        self.cache = cache
        self._vocab_limit = vocab_limit
        self._pages = PageAllocator(cache.num_pages, cache.pages[:, 0].nbytes)
        self._rope = rope

    @property
    def free_pages(self) -> int:
        """Pages of the cache that no sequence holds."""
        return self._pages.free_pages

    def has_room(self, prompt: Sequence[int], total_tokens: int) -> bool:
        """Return whether `open` would find pages now."""
        return -(-total_tokens // PAGE_TOKENS) <= self._pages.free_pages

    def cache_use(self) -> CacheUse:
        """Return how full the cache is."""
        return CacheUse(pages_used=self._pages.num_pages - self.free_pages, pages_total=self._pages.num_pages)

    def open(self, prompt: Sequence[int], total_tokens: int) -> SequenceState:
        """Reserve pages for a sequence of at most `total_tokens`; raises MemoryLimitError if there are too few."""
        rope = self._rope
        if self.config.rope_scaling.kind == "dynamic":
            rope = rope_table(self.config, total_tokens).to(self.device)
        pages = self._pages.take(-(-total_tokens // PAGE_TOKENS))
        return PagedSequence(list(prompt), len(prompt), pages, rope)

    def prefill(
        self,
        sequence: SequenceState,
        cancel: CancelToken,
        progress: Callable[[int, int], None],
        pause: Callable[[], bool] = never,
    ) -> None:
        """Fill the cache for all but the last token, chunk by chunk; see `Backend.prefill`."""
        own = own_sequence(sequence)
        total = len(own.tokens) - 1
        pages = own.page_table.to(self.device)  # once, not in every layer
        while own.length < total and not cancel.is_set:
            end = min(own.length + PREFILL_CHUNK_TOKENS, total)
            chunk = own.tokens[own.length : end]
            table = pages if len(chunk) > 1 else own.page_table
            self.model.extend(chunk, Place(self.cache, table, own.rope, own.length))
            if self.model.device.type == "cuda":
                torch.cuda.synchronize(self.model.device)  # done, not queued, when progress and cancel look
            own.length = end
            progress(end, total)
            if pause():
                return

    def release(self, sequence: SequenceState) -> None:
        """Give the sequence's pages back."""
        self._pages.give(own_sequence(sequence).page_table)

    def close(self) -> None:
        """Drop weights and cache."""
        del self.model, self.cache, self._rope
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def step_by_step(
        self,
        own: PagedSequence,
        sampling: Sampling,
        limit: int,
        stop_ids: frozenset[int],
        cancel: CancelToken,
        logits: Callable[[PagedSequence], torch.Tensor],
        mask: torch.Tensor | None = None,
    ) -> Generator[DecodedToken, None, None]:
        """Yield up to `limit` tokens, each chosen from `logits`, which appends the last token and returns (vocab,)."""
        counts = None
        if mask is not None:
            mask = mask.to(self.device)
        if sampling.penalised:
            counts = TokenCounts.start(own.tokens, own.prompt_tokens, self.config.vocab_size, self.device)
        for _ in range(limit):
            if cancel.is_set:
                return
            choice = choose(logits(own), sampling, len(own.tokens), counts, vocab_limit=self._vocab_limit, mask=mask)
            own.add(choice.token_id)
            if counts is not None:
                counts.add(choice.token_id)
            yield DecodedToken(choice.token_id, choice.logprob, choice.top)
            if choice.token_id in stop_ids:
                return


def own_sequence(sequence: SequenceState) -> PagedSequence:
    """Return a backend's own view of a sequence; raises TypeError if it is none of its kind."""
    if not isinstance(sequence, PagedSequence):
        raise TypeError(f"this sequence belongs to another backend: {type(sequence).__name__}")
    return sequence
