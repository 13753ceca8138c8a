"""What an engine asks of whatever computes: prefill a prompt, then decode tokens one after another."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from onekernel.config import ModelConfig, Sampling
from onekernel.engine.request import CancelToken


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


class Backend(Protocol):
    """Computes tokens. Every call comes from the engine's one thread."""

    name: str
    device: str
    config: ModelConfig
    max_context: int
    memory: MemoryReport

    def open(self, prompt: Sequence[int], total_tokens: int) -> SequenceState:
        """Reserve pages for a prompt of token ids that grows to at most `total_tokens`, answer included."""
        ...

    def prefill(self, sequence: SequenceState, cancel: CancelToken, progress: Callable[[int, int], None]) -> None:
        """Fill the cache for prompt[:-1] in fixed chunks, calling progress(done, total); return early if cancelled."""
        ...

    def decode(
        self,
        sequence: SequenceState,
        sampling: Sampling,
        limit: int,
        stop_ids: frozenset[int],
        cancel: CancelToken,
    ) -> Generator[DecodedToken, None, None]:
        """Yield up to `limit` tokens, starting from the last prompt token; end after one of `stop_ids` or if cancelled.

        A backend may run ahead of the iterator; closing the iterator ends it. Raises NumericError on non-finite logits.
        """
        ...

    def release(self, sequence: SequenceState) -> None:
        """Give the sequence's pages back."""
        ...

    def close(self) -> None:
        """Free everything on the device."""
        ...
