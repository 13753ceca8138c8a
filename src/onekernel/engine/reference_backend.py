"""The PyTorch reference as a backend: any device, one token a step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from onekernel.config import PREFILL_CHUNK_TOKENS, Sampling
from onekernel.engine.backend import DecodedToken, MemoryReport, SequenceState
from onekernel.engine.pages import PageAllocator
from onekernel.engine.request import CancelToken
from onekernel.models.model import Model, Place
from onekernel.phases.attention.cache import KVCache
from onekernel.phases.attention.rope import rope_table
from onekernel.phases.choose.reference import TokenCounts, choose


@dataclass(slots=True)
class _Sequence:
    """Tokens so far, the pages they own, and how many of them are in the cache."""

    tokens: list[int]
    prompt_tokens: int
    page_table: torch.Tensor
    rope: torch.Tensor
    length: int = field(default=0)


class ReferenceBackend:
    """Runs `Model` phase by phase. `vocab_limit`: ids from there on are padding and never chosen."""

    name = "reference"

    def __init__(
        self, model: Model, *, max_context: int, num_pages: int, vocab_limit: int, memory: MemoryReport
    ) -> None:
        self.model = model
        self.config = model.config
        self.device = str(model.device)
        self.max_context = max_context
        self.memory = memory
        self._vocab_limit = vocab_limit
        self._cache = KVCache.allocate(model.config, num_pages, model.dtype, self.device)
        self._pages = PageAllocator(num_pages, self._cache.pages[:, 0].numel() * model.dtype.itemsize)
        self._rope = rope_table(model.config, max_context).to(self.device)

    def open(self, prompt: Sequence[int], total_tokens: int) -> SequenceState:
        """Reserve pages for a sequence of at most `total_tokens`; raises MemoryLimitError if there are too few."""
        rope = self._rope
        if self.config.rope_scaling.kind == "dynamic":
            rope = rope_table(self.config, total_tokens).to(self.device)
        pages = self._pages.take(-(-total_tokens // self._cache.pages.shape[4]))
        return _Sequence(list(prompt), len(prompt), pages, rope)

    def prefill(self, sequence: SequenceState, cancel: CancelToken, progress: Callable[[int, int], None]) -> None:
        """Fill the cache for all but the last token, chunk by chunk; progress(done, total) after each."""
        own = _own(sequence)
        total = len(own.tokens) - 1
        while own.length < total and not cancel.is_set:
            end = min(own.length + PREFILL_CHUNK_TOKENS, total)
            self.model.extend(own.tokens[own.length : end], self._place(own))
            if self.model.device.type == "cuda":
                torch.cuda.synchronize(
                    self.model.device
                )  # done, not queued, when progress and cancel look
            own.length = end
            progress(end, total)

    def decode(
        self,
        sequence: SequenceState,
        sampling: Sampling,
        limit: int,
        stop_ids: frozenset[int],
        cancel: CancelToken,
    ) -> Generator[DecodedToken, None, None]:
        """Yield up to `limit` tokens; see `Backend.decode`."""
        own = _own(sequence)
        counts = None
        if sampling.penalised:
            counts = TokenCounts.start(own.tokens, own.prompt_tokens, self.config.vocab_size, self.device)
        for _ in range(limit):
            if cancel.is_set:
                return
            logits = self.model.logits(own.tokens[-1:], self._place(own))[0]
            own.length += 1
            choice = choose(logits, sampling, len(own.tokens), counts, vocab_limit=self._vocab_limit)
            own.tokens.append(choice.token_id)
            if counts is not None:
                counts.add(choice.token_id)
            yield DecodedToken(choice.token_id, choice.logprob, choice.top)
            if choice.token_id in stop_ids:
                return

    def logits(self, tokens: Sequence[int], first: int) -> Iterator[torch.Tensor]:
        """Yield logits, (n, vocab_size) float32, that follow tokens[first], tokens[first + 1], ... chunk by chunk.

        For measuring, while no request runs. Chunks begin at `first`, so that none is larger than a prefill chunk.
        """
        own = _own(self.open(tokens, len(tokens)))
        try:
            while own.length < len(tokens):
                stop = first if own.length < first else len(tokens)
                chunk = own.tokens[own.length : min(own.length + PREFILL_CHUNK_TOKENS, stop)]
                if own.length < first:
                    self.model.extend(chunk, self._place(own))
                else:
                    yield self.model.logits(chunk, self._place(own))
                own.length += len(chunk)
        finally:
            self.release(own)

    def release(self, sequence: SequenceState) -> None:
        """Give the sequence's pages back."""
        self._pages.give(_own(sequence).page_table)

    def close(self) -> None:
        """Drop weights and cache."""
        del self.model, self._cache
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def _place(self, own: _Sequence) -> Place:
        return Place(self._cache, own.page_table, own.rope, own.length)


def _own(sequence: SequenceState) -> _Sequence:
    if not isinstance(sequence, _Sequence):
        raise TypeError(f"this sequence belongs to another backend: {type(sequence).__name__}")
    return sequence
