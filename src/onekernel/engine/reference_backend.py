"""The PyTorch reference as a backend: any device, one token a step."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch

from onekernel.config import PREFILL_CHUNK_TOKENS, Sampling
from onekernel.engine.backend import DecodedToken, MemoryReport, SequenceState
from onekernel.engine.paged_backend import PagedBackend, PagedSequence, own_sequence
from onekernel.engine.request import CancelToken
from onekernel.models.model import Model, Place
from onekernel.phases.attention.cache import KVCache
from onekernel.phases.attention.rope import rope_table


class ReferenceBackend(PagedBackend):
    """Runs `Model` phase by phase. `vocab_limit`: ids from there on are padding and never chosen."""

    name = "reference"

    def __init__(
        self,
        model: Model,
        *,
        max_context: int,
        num_pages: int,
        vocab_limit: int,
        memory: MemoryReport,
        prefix_cache: bool = False,
    ) -> None:
        cache = KVCache.allocate(model.config, num_pages, model.dtype, str(model.device), plain=True)
        rope = rope_table(model.config, max_context).to(model.device)
        super().__init__(
            model,
            cache,
            rope,
            max_context=max_context,
            vocab_limit=vocab_limit,
            memory=memory,
            prefix_cache=prefix_cache,
        )

    def decode(
        self,
        sequence: SequenceState,
        sampling: Sampling,
        limit: int,
        stop_ids: frozenset[int],
        cancel: CancelToken,
        mask: torch.Tensor | None = None,
    ) -> Generator[DecodedToken, None, None]:
        """Yield up to `limit` tokens; see `Backend.decode`."""
        own = own_sequence(sequence)
        yield from self.step_by_step(own, sampling, limit, stop_ids, cancel, self._next_logits, mask)

    def logits(self, tokens: Sequence[int], first: int) -> Iterator[torch.Tensor]:
        """Yield logits, (n, vocab_size) float32, that follow tokens[first], tokens[first + 1], ... chunk by chunk.

        For measuring, while no request runs. Chunks begin at `first`, so that none is larger than a prefill chunk.
        """
        own = self.lease(tokens, len(tokens), reuse=False)
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
            self.release(own, failed=True)  # not prefilled in the usual chunks, so not for others

    @torch.inference_mode()
    def inner(self, tokens: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (layer, activate(gate) * up), values (n, intermediate_size) float32, of all layers chunk by chunk.

        For measuring, while no request runs.
        """
        own = self.lease(tokens, len(tokens), reuse=False)
        try:
            while own.length < len(tokens):
                chunk = own.tokens[own.length : own.length + PREFILL_CHUNK_TOKENS]
                acts, place = self.model.start(chunk), self._place(own)
                for phase in self.model.phases[:-1]:
                    self.model.run(phase, acts, place)
                    if phase.name == "gate_up" and acts.inner is not None:
                        yield phase.layer, acts.inner
                own.length += len(chunk)
        finally:
            self.release(own, failed=True)

    def _next_logits(self, own: PagedSequence) -> torch.Tensor:
        return self.model.logits(own.tokens[-1:], self._place(own))[0]

    def _place(self, own: PagedSequence) -> Place:
        return Place(self.cache, own.page_table, own.rope, own.length)
