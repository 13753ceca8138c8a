"""What comes back of a request: deltas while it runs, a completion at the end; and the token that cancels it."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token in the unfiltered distribution, with its text and its bytes."""

    token_id: int
    text: str
    bytes: tuple[int, ...]
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens taken and made. `cached_tokens` of the prompt came from the prefix cache and were not prefilled."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Host-side times of one request. Prefill covers prompt[:-1]; TTFT is from submission to the first token.

    `prefill_ms` and `prefill_tokens` leave out what the prefix cache gave. `decode_ms` is from the first to the last
    token, other requests' turns in between included, so its rate is over completion_tokens - 1.
    """

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    decode_ms: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second of prefill; 0 if nothing was prefilled."""
        return self.prefill_tokens / self.prefill_ms * 1e3 if self.prefill_ms else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second after the first; 0 if there were fewer than two."""
        return (self.decode_tokens - 1) / self.decode_ms * 1e3 if self.decode_ms and self.decode_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a running answer. The joined `text` of all deltas that are not thinking is the completion's text.

    `thinking` marks text between a thinking model's tags. The last delta has `finish_reason` and may have no text.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    thinking: bool = False
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer. `text` ends before the stop string; `token_ids` leave out the token that ended the answer.

    `usage.completion_tokens` counts the sampled tokens, an end-of-sequence token included.
    """

    text: str
    thinking: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    seed: int
    prompt_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None


class Constraint(Protocol):
    """What limits an answer's next token, such as a grammar. One object serves one request, on the engine's thread."""

    def mask(self) -> torch.Tensor | None:
        """Return which tokens may come next, bool (vocab_size,) on the CPU, True where allowed; None: all.

        While the text is incomplete it should forbid end-of-sequence ids, and allow them once it may end.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Take the token that was chosen; one that ends the answer (end-of-sequence, stop id) is not handed over."""
        ...

    @property
    def done(self) -> bool:
        """Whether the text is complete, so that the answer ends with reason "stop"."""
        ...


@dataclass(slots=True, eq=False)
class CancelToken:
    """Set by any thread; the engine looks at it between tokens and between prefill chunks.

    `told`: a queue that takes the token when it is set, so that nobody has to look at those of waiting requests.
    """

    told: queue.SimpleQueue[CancelToken] | None = None
    _event: threading.Event = field(default_factory=threading.Event)

    def set(self) -> None:
        """Ask the request to end. Safe in a destructor."""
        if not self._event.is_set():
            self._event.set()
            if self.told is not None:
                self.told.put(self)

    @property
    def is_set(self) -> bool:
        """Whether the request should end."""
        return self._event.is_set()
