"""What an engine asks of whatever computes: prefill a prompt, then decode tokens one after another."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from onekernel.config import ModelConfig, Sampling
from onekernel.engine.request import CancelToken
from onekernel.engine.status import CacheUse

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DecodedToken:
    """One chosen token; `logprob` and `top` (id, logprob) only if the sampling asked for them."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes an engine holds, known before it allocates: packed weights, KV cache, everything else."""

    weights_bytes: int
    kv_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum."""
        return self.weights_bytes + self.kv_bytes + self.workspace_bytes


class SequenceState(Protocol):
    """A backend's own state of one sequence: its pages and its length."""

    @property
    def length(self) -> int:
        """Positions whose keys and values are in the cache."""
        ...


def never() -> bool:
    """Return False: nothing asks a prefill to pause."""
    return False


class Backend(Protocol):
    """Computes tokens. Every call comes from the engine's one thread."""

    name: str
    device: str
    config: ModelConfig
    max_context: int
    memory: MemoryReport

    def has_room(self, prompt: Sequence[int], total_tokens: int) -> bool:
        """Return whether `open` would find pages now; raises MemoryLimitError if it never could."""
        ...

    def open(self, prompt: Sequence[int], total_tokens: int) -> SequenceState:
        """Reserve pages for a prompt of token ids that grows to at most `total_tokens`, answer included.

        The sequence's length is what the prefix cache gave. Raises MemoryLimitError if there is no room now.
        """
        ...

    def prefill(
        self,
        sequence: SequenceState,
        cancel: CancelToken,
        progress: Callable[[int, int], None],
        pause: Callable[[], bool] = never,
    ) -> None:
        """Fill the cache for prompt[:-1] in fixed chunks, calling progress(done, total).

        Returns early if cancelled, or if `pause()` after a chunk; a further call goes on there.
        """
        ...

    def decode(
        self,
        sequence: SequenceState,
        sampling: Sampling,
        limit: int,
        stop_ids: frozenset[int],
        cancel: CancelToken,
        mask: torch.Tensor | None = None,
    ) -> Generator[DecodedToken, None, None]:
        """Yield up to `limit` tokens after the sequence's last one; end after one of `stop_ids` or if cancelled.

        mask: bool (vocab_size,) on the CPU, True where a token is allowed; given with a limit of 1. A backend may run
        ahead of the iterator; closing the iterator ends it, and what was not taken from it does not count. A further
        call goes on after the last token taken, as if there had been one call. Raises NumericError on non-finite
        logits.
        """
        ...

    def release(self, sequence: SequenceState, *, failed: bool = False) -> None:
        """Give the sequence's pages back, or to the prefix cache, unless the sequence failed."""
        ...

    def cache_use(self) -> CacheUse:
        """Return how full the KV cache is. May be called from any thread."""
        ...

    def close(self) -> None:
        """Free everything on the device."""
        ...
