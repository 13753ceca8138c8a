"""One request inside the engine: what to compute, where its events go, how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from onekernel.config import Sampling, SamplingParams
from onekernel.engine.answer import Answer
from onekernel.engine.backend import SequenceState
from onekernel.engine.request import CancelToken, Completion, Constraint, Delta, Timings, Usage

Event = Delta | Completion | BaseException
Deliver = Callable[[Event], None]
Progress = Callable[[int, int], None]


@dataclass(slots=True, eq=False)
class Job:
    """A request. `limit`: answer tokens at most. `sequence` is None until its first turn."""

    prompt: tuple[int, ...]
    params: SamplingParams
    sampling: Sampling
    limit: int
    answer: Answer
    deliver: Deliver
    progress: Progress
    constraint: Constraint | None
    cancel: CancelToken
    sequence: SequenceState | None = None
    cached_tokens: int = 0
    submitted: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    prefill_s: float = 0.0
    prefilled_tokens: int = 0
    first_token: float = 0.0
    last_token: float = 0.0

    @property
    def held(self) -> SequenceState:
        """The sequence, once the request has had a turn."""
        if self.sequence is None:
            raise ValueError("this request has not had a turn yet, so it holds no pages")
        return self.sequence

    @property
    def total_tokens(self) -> int:
        """Positions of prompt and answer at most."""
        return len(self.prompt) + self.limit

    @property
    def left(self) -> int:
        """Tokens that the answer may still have."""
        return self.limit - self.answer.sampled_tokens

    def begin(self, sequence: SequenceState) -> None:
        """Note the first turn and what the prefix cache gave."""
        self.sequence = sequence
        self.cached_tokens = sequence.length
        self.started = time.perf_counter()

    def count_token(self) -> None:
        """Note the time of a token, before it is counted by the answer."""
        self.last_token = time.perf_counter()
        self.first_token = self.first_token or self.last_token

    def completion(self) -> Completion:
        """Return the finished answer with its usage and times."""
        answer, ended = self.answer, time.perf_counter()
        timings = Timings(
            queue_ms=((self.started or ended) - self.submitted) * 1e3,
            prefill_ms=self.prefill_s * 1e3,
            ttft_ms=(self.first_token - self.submitted) * 1e3 if self.first_token else 0.0,
            decode_ms=(self.last_token - self.first_token) * 1e3,
            prefill_tokens=self.prefilled_tokens,
            decode_tokens=answer.sampled_tokens,
        )
        return Completion(
            text=answer.text,
            thinking=answer.thinking,
            token_ids=tuple(answer.token_ids),
            finish_reason=answer.finish_reason or "length",
            usage=Usage(len(self.prompt), answer.sampled_tokens, self.cached_tokens),
            timings=timings,
            seed=self.sampling.seed,
            prompt_token_ids=self.prompt,
            logprobs=tuple(answer.logprobs) if self.params.logprobs is not None else None,
        )
