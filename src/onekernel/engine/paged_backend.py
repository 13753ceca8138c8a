"""What backends share: sequences in a paged cache, prefill by the model's phases, and choosing token by token."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch

from onekernel.config import PREFILL_CHUNK_TOKENS, Sampling
from onekernel.engine.backend import DecodedToken, MemoryReport, SequenceState, never
from onekernel.engine.pages import Lease, PagePool
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
    lease: Lease
    rope: torch.Tensor
    length: int
    counts: TokenCounts | None = None
    """What the penalties count, once one is on."""

    @property
    def page_table(self) -> torch.Tensor:
        """The pages of all positions, in order: (pages,) int64 on the CPU."""
        return self.lease.table

    def add(self, token_id: int) -> None:
        """Take a token that was chosen after the last one had been appended to the cache."""
        self.tokens.append(token_id)
        self.length += 1
        if self.counts is not None:
            self.counts.add(token_id)


class PagedBackend:
    """A model and its cache. `vocab_limit`: ids from there on are padding and never chosen.

    prefix_cache: keep the pages of ended sequences for later ones that begin alike. PyTorch's prefill computes whole
    chunks of 512 tokens at the same places whatever was there before, so a prompt whose reused part was prefilled in
    whole chunks gets the bits of a cold run; the prefill kernels give them however a prompt is cut. Other pages (of a
    shorter prompt's last chunk on PyTorch, or of an answer) hold values that differ from a cold run's in rounding. Off
    with dynamic RoPE scaling, whose keys depend on how long a request may become.
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
        prefix_cache: bool = False,
    ) -> None:
        self.model = model
        self.config = model.config
        self.device = str(model.device)
        self.max_context = max_context
        self.memory = memory
        self.cache = cache
        self._vocab_limit = vocab_limit
        reuse = prefix_cache and model.config.rope_scaling.kind != "dynamic"
        self._pages = PagePool(cache.num_pages, cache.pages[:, 0].nbytes, reuse=reuse)
        self._rope = rope

    @property
    def free_pages(self) -> int:
        """Pages of the cache that no running sequence holds."""
        return self._pages.free_pages

    def has_room(self, prompt: Sequence[int], total_tokens: int) -> bool:
        """Return whether `open` would find pages now; raises MemoryLimitError if it never could."""
        return self._pages.has_room(prompt, total_tokens)

    def cache_use(self) -> CacheUse:
        """Return how full the cache is."""
        return self._pages.use

    def open(self, prompt: Sequence[int], total_tokens: int) -> SequenceState:
        """Reserve pages for a sequence of at most `total_tokens`; raises MemoryLimitError if there are too few."""
        return self.lease(prompt, total_tokens)

    def lease(self, prompt: Sequence[int], total_tokens: int, *, reuse: bool = True) -> PagedSequence:
        """Reserve pages like `open`; without `reuse` the sequence begins empty whatever the prefix cache holds."""
        rope = self._rope
        if self.config.rope_scaling.kind == "dynamic":
            rope = rope_table(self.config, total_tokens).to(self.device)
        lease = self._pages.take(prompt, total_tokens, reuse=reuse)
        return PagedSequence(list(prompt), len(prompt), lease, rope, lease.cached_tokens)

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
            end = min((own.length // self.chunk_tokens + 1) * self.chunk_tokens, total)
            self.extend(own, own.tokens[own.length : end], pages)
            if self.model.device.type == "cuda":
                torch.cuda.synchronize(self.model.device)  # done, not queued, when progress and cancel look
            own.length = end
            progress(end, total)
            if pause():
                break
        if own.length == total:
            self._pages.share(own.lease, own.tokens[:total])

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a whole chunk of the prompt."""
        return PREFILL_CHUNK_TOKENS

    def extend(self, own: PagedSequence, chunk: Sequence[int], pages: torch.Tensor) -> None:
        """Append keys and values of the chunk that follows; `pages` is the sequence's page table on the device."""
        table = pages if len(chunk) > 1 else own.page_table
        self.model.extend(chunk, Place(self.cache, table, own.rope, own.length))

    def release(self, sequence: SequenceState, *, failed: bool = False) -> None:
        """Give the sequence's pages back; the whole ones stay findable, unless it failed."""
        own = own_sequence(sequence)
        if failed:
            self._pages.destroy(own.lease)
            return
        self._pages.share(own.lease, own.tokens[: own.length])
        self._pages.give(own.lease)

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
        if mask is not None:
            mask = mask.to(self.device)
        if sampling.penalised and own.counts is None:
            own.counts = TokenCounts.start(own.tokens, own.prompt_tokens, self.config.vocab_size, self.device)
        for _ in range(limit):
            if cancel.is_set:
                return
            choice = choose(
                logits(own), sampling, len(own.tokens), own.counts, vocab_limit=self._vocab_limit, mask=mask
            )
            own.add(choice.token_id)
            yield DecodedToken(choice.token_id, choice.logprob, choice.top)
            if choice.token_id in stop_ids:
                return


def own_sequence(sequence: SequenceState) -> PagedSequence:
    """Return a backend's own view of a sequence; raises TypeError if it is none of its kind."""
    if not isinstance(sequence, PagedSequence):
        raise TypeError(f"this sequence belongs to another backend: {type(sequence).__name__}")
    return sequence
