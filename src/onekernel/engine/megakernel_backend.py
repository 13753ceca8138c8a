"""The megakernel as a backend: prefill from the packed weights, then one launch for the answer."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from onekernel.config import Sampling
from onekernel.engine.backend import DecodedToken, MemoryReport, SequenceState
from onekernel.engine.choosing import Choosing
from onekernel.engine.chunk_prefill import ChunkPrefill
from onekernel.engine.megakernel import MAX_STOP_IDS, Megakernel
from onekernel.engine.paged_backend import PagedBackend, PagedSequence, own_sequence
from onekernel.engine.request import CancelToken
from onekernel.engine.running_launch import Patience, RunningLaunch
from onekernel.engine.ternary import operators_for, place_packed_on
from onekernel.errors import ConfigError, NumericError, OnekernelError
from onekernel.models.model import Model
from onekernel.models.packed_weights import PackedWeights
from onekernel.plan.abi import MAX_LAUNCH_TOKENS, Failure


class MegakernelBackend(PagedBackend):
    """An answer is one launch, however its tokens are chosen.

    `launch_tokens`: most tokens of a launch; a longer answer goes on in the next one. `prefill`: the kernels that do
    it; None: the model's phases, on dense weights unpacked one layer at a time, on ternary ones as they lie.
    """

    name = "megakernel"

    def __init__(
        self,
        megakernel: Megakernel,
        *,
        memory: MemoryReport,
        launch_tokens: int = MAX_LAUNCH_TOKENS,
        patience: Patience | None = None,
        prefix_cache: bool = False,
        prefill: ChunkPrefill | None = None,
    ) -> None:
        packed, limits = megakernel.packed, megakernel.plan.limits
        # Operators load their kernels now only if prompts go through them.
        place = operators_for(packed) if prefill is None else place_packed_on(str(packed.arena.device))
        model = Model(packed.config, PackedWeights(packed, place))
        super().__init__(
            model,
            megakernel.cache,
            packed.rope,
            max_context=limits.max_context,
            vocab_limit=int(megakernel.plan.header["vocab_limit"]),
            memory=memory,
            prefix_cache=prefix_cache,
        )
        self.megakernel = megakernel
        self._prefill = prefill
        self.active_neurons: tuple[float, ...] | None = None
        """How many neurons of each layer fired for a token of the last launch; None if the feed-forwards are dense."""
        self._launch_tokens = launch_tokens
        self.patience = patience or Patience()
        self._table_pages = limits.table_pages

    def decode(
        self,
        sequence: SequenceState,
        sampling: Sampling,
        limit: int,
        stop_ids: frozenset[int],
        cancel: CancelToken,
        mask: torch.Tensor | None = None,
    ) -> Generator[DecodedToken, None, None]:
        """Yield up to `limit` tokens; see `Backend.decode`. Raises DeviceError if the kernel had to be stopped."""
        own = own_sequence(sequence)
        table = self.device_table(own)
        if self.config.rope_scaling.kind == "dynamic":
            self.megakernel.packed.write_rope(own.rope)
        end = own.length + limit
        while own.length < end and not cancel.is_set:
            choosing = Choosing(sampling, tuple(own.tokens), own.prompt_tokens, mask)
            yield from self._launch(own, table, choosing, min(end - own.length, self._launch_tokens), stop_ids, cancel)
            if own.tokens[-1] in stop_ids:
                return

    @property
    def resting_bytes(self) -> int:
        """Bytes of neurons that did not fire, and so were not read, for a token of the last launch."""
        if self.active_neurons is None:
            return 0
        resting = self.config.intermediate_size * len(self.active_neurons) - sum(self.active_neurons)
        return int(4 * self.config.hidden_size * resting)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a whole chunk of the prompt."""
        return super().chunk_tokens if self._prefill is None else self._prefill.chunk_tokens

    def extend(self, own: PagedSequence, chunk: Sequence[int], pages: torch.Tensor) -> None:
        """Append keys and values of the chunk that follows; see `PagedBackend.extend`."""
        if self._prefill is None:
            super().extend(own, chunk, pages)
            return
        if self.config.rope_scaling.kind == "dynamic":
            self.megakernel.packed.write_rope(own.rope)
        self._prefill.run(chunk, pages, own.length)

    def close(self) -> None:
        """Drop weights, cache and kernels."""
        del self.megakernel, self._prefill
        super().close()

    def _launch(
        self,
        own: PagedSequence,
        table: torch.Tensor,
        choosing: Choosing,
        limit: int,
        stop_ids: frozenset[int],
        cancel: CancelToken,
    ) -> Generator[DecodedToken, None, None]:
        """Yield the tokens of one launch, which runs ahead; what it made beyond the last one taken does not count."""
        known_to_kernel = sorted(stop_ids)[:MAX_STOP_IDS]
        self.megakernel.launch(
            own.tokens[-1:],
            [own.length],
            table,
            limit,
            stop_ids=known_to_kernel,
            choosing=[choosing],
            block_pages=self.megakernel.plan.block_pages_after(own.prompt_tokens),
        )
        running = RunningLaunch(self.megakernel, self.patience)
        try:
            for index in range(limit):
                slot = running.token(index, cancel)
                if slot is None:
                    return
                if slot.failure is not None:
                    raise self._no_token(slot.failure, len(own.tokens))
                own.add(slot.token_id)
                yield DecodedToken(slot.token_id, slot.logprob, slot.top)
                if slot.last or slot.token_id in stop_ids:
                    return
        finally:
            running.end()
            self.active_neurons = self.megakernel.active_neurons()

    def _no_token(self, failure: Failure, position: int) -> OnekernelError:
        match failure:
            case Failure.EMPTY:
                return ConfigError(
                    f"no token is left at position {position}: the mask and logit_bias together exclude all "
                    f"{self._vocab_limit}"
                )
            case Failure.SCORES:
                return ConfigError(
                    f"penalties and temperature made a score that is not finite at position {position}; use milder ones"
                )
            case Failure.LOGITS:
                return NumericError(
                    f"logits at position {position} are NaN or infinite, so no token can be chosen; the weights are "
                    f"damaged or a layer overflowed: check the files, or try float32"
                )

    def device_table(self, own: PagedSequence) -> torch.Tensor:
        """Return the sequence's page table as the kernel takes it; entries beyond its pages are never looked at."""
        table = torch.zeros(1, self._table_pages, dtype=torch.int32)
        table[0, : len(own.page_table)] = own.page_table
        return table.to(self.device)
