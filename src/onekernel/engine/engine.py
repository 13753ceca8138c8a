"""One thread owns the device. Requests wait in a queue, run one after another, and answer through a callback."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch

from onekernel.config import EngineConfig, Sampling, SamplingParams
from onekernel.engine.answer import Answer
from onekernel.engine.backend import Backend, DecodedToken, SequenceState
from onekernel.engine.request import CancelToken, Completion, Constraint, Delta, Timings, Usage
from onekernel.engine.status import EngineStatus
from onekernel.errors import (
    ConfigError,
    ContextLengthError,
    DeviceError,
    EngineClosedError,
    MemoryLimitError,
    OnekernelError,
    QueueFullError,
)
from onekernel.text.thinking import ThinkingSplitter
from onekernel.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

Event = Delta | Completion | BaseException
Deliver = Callable[[Event], None]
Progress = Callable[[int, int], None]


@dataclass(slots=True)
class _Job:
    """A queued request: what to compute, where its events go, how far it is."""

    prompt: tuple[int, ...]
    params: SamplingParams
    sampling: Sampling
    answer: Answer
    deliver: Deliver
    progress: Progress
    constraint: Constraint | None
    cancel: CancelToken = field(default_factory=CancelToken)
    submitted: float = field(default_factory=time.perf_counter)


class Engine:
    """Runs requests on a backend, first come first served.

    `submit` may be called from any thread. A request's events are deltas, then one Completion, or an exception at any
    point; its callback is called on the engine's thread and must return quickly.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        generation_config: Mapping[str, Any],
        options: EngineConfig | None = None,
    ) -> None:
        self.options = options or EngineConfig()
        self.backend = backend
        self.tokenizer = tokenizer
        self.generation_config = generation_config
        self.failure: BaseException | None = None
        self._closed = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._running: _Job | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="onekernel-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        deliver: Deliver,
        *,
        progress: Progress = lambda done, total: None,
        splitter: ThinkingSplitter | None = None,
        continues: bool = True,
        constraint: Constraint | None = None,
    ) -> CancelToken:
        """Queue a request and return the token that cancels it.

        Raises ConfigError (empty prompt, ids outside the vocabulary), ContextLengthError, QueueFullError or
        EngineClosedError before anything is queued. progress(done, total) counts prompt tokens. `splitter` and
        `continues` say how to read the answer, see `engine.prompt.Encoded`. A `constraint` serves this request only.
        """
        if threading.current_thread() is self._thread:
            raise EngineClosedError(
                "a request was submitted from a callback on the engine's own thread, which it would block"
            )
        if not isinstance(params, SamplingParams):
            raise ConfigError(f"the sampling parameters are {params!r:.80}; give a SamplingParams")
        self._check(prompt, params)
        sampling = params.resolve(self.generation_config)
        answer = Answer(self.tokenizer, params, self._ends(params), splitter, continues=continues)
        job = _Job(prompt, params, sampling, answer, deliver, progress, constraint)
        with self._lock:
            self._refuse_if_closed()
            waiting = self._jobs.qsize()
            if waiting >= self.options.max_waiting and self._running is not None:
                raise QueueFullError(waiting, self.options.max_waiting)
            self._jobs.put(job)
        return job.cancel

    def status(self) -> EngineStatus:
        """Return what the engine is doing. May be called from any thread, also after `close`."""
        use = self.backend.cache_use()
        with self._lock:
            return EngineStatus(
                running=int(self._running is not None),
                waiting=self._jobs.qsize(),
                kv_pages_used=use.pages_used,
                kv_pages_cached=use.pages_cached,
                kv_pages_total=use.pages_total,
                prefix_hit_tokens=use.hit_tokens,
                prefix_query_tokens=use.query_tokens,
                failure=None if self.failure is None else str(self.failure),
                closed=self._closed,
            )

    def close(self) -> None:
        """Cancel everything, wait for the thread, and free the device. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._running is not None:
                self._running.cancel.set()
            self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.backend.close()

    def _ends(self, params: SamplingParams) -> frozenset[int]:
        """Return the ids that end an answer."""
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.tokenizer.eos_token_ids)

    def _check(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        config, context = self.backend.config, self.backend.max_context
        if not prompt:
            raise ConfigError("the prompt is empty; give at least one token")
        limit = min(config.vocab_size, self.tokenizer.vocab_limit)
        for what, ids in (
            ("the prompt", prompt),
            ("logit_bias", params.logit_bias or {}),
            ("stop_token_ids", params.stop_token_ids),
        ):
            wrong = next((token for token in ids if not 0 <= token < limit), None)
            if wrong is not None:
                raise ConfigError(f"{what} holds token id {wrong}; this model's ids are 0 to {limit - 1}")
        if len(prompt) >= context:
            raise ContextLengthError(len(prompt), context, config.context_limit)

    def _refuse_if_closed(self) -> None:
        if self.failure is not None:
            raise EngineClosedError(f"the engine failed earlier and takes no requests: {self.failure}")
        if self._closed:
            raise EngineClosedError("the engine is closed; create a new one")

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                with self._lock:
                    self._refuse_if_closed()
                    self._running = job
                self._deliver(job, self._run(job))
            except BaseException as error:
                self._deliver(job, self._judge(error))
            finally:
                self._running = None

    @staticmethod
    def _deliver(job: _Job, event: Event) -> None:
        """Hand an event to the request's owner; an owner who is gone only loses his own request."""
        try:
            job.deliver(event)
        except Exception:
            _log.warning("a request's owner does not take its answer any more; cancelling it", exc_info=True)
            job.cancel.set()

    def _judge(self, error: BaseException) -> BaseException:
        """Say what a failed request's caller is told, and whether the engine can go on."""
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error):
            if self.backend.device.startswith("cuda"):
                torch.cuda.empty_cache()
            told: BaseException = MemoryLimitError(
                f"out of memory on {self.backend.device} during this request; others go on. Ask for a shorter answer "
                f"or start with a smaller --ctx-size (now {self.backend.max_context}). {error}",
                0,
                0,
                0,
            )
            told.__cause__ = error
            return told
        if (isinstance(error, DeviceError) and error.context_lost) or "CUDA error" in str(error):
            self.failure = error  # a CUDA context does not recover; one whose kernel was stopped does not need to
        if not isinstance(error, OnekernelError):
            _log.error("a request failed unexpectedly", exc_info=error)
        return error

    def _tokens(self, job: _Job, sequence: SequenceState, limit: int) -> Generator[DecodedToken, None, None]:
        """Yield up to `limit` tokens: of one run, or with a constraint of a run for each."""
        decode, ends = self.backend.decode, job.answer.end_ids
        if job.constraint is None:
            yield from decode(sequence, job.sampling, limit, ends, job.cancel)
            return
        for _ in range(limit):
            for token in decode(sequence, job.sampling, 1, ends, job.cancel, job.constraint.mask()):
                if token.token_id not in ends:
                    job.constraint.accept(token.token_id)
                yield token
                if token.token_id in ends:
                    return
                if job.constraint.done:
                    job.answer.finish_reason = "stop"
                    return

    def _run(self, job: _Job) -> Completion:
        backend, prompt = self.backend, job.prompt
        started = time.perf_counter()
        room = backend.max_context - len(prompt)
        limit = min(room, job.params.max_tokens or room)
        answer = job.answer
        times: list[float] = []
        sequence = backend.open(prompt, len(prompt) + limit)
        try:
            backend.prefill(sequence, job.cancel, job.progress)
            prefilled = time.perf_counter()
            with closing(self._tokens(job, sequence, limit)) as tokens:
                for token in tokens if not job.cancel.is_set else ():
                    times.append(time.perf_counter())
                    for delta in answer.push(token):
                        self._deliver(job, delta)
                    if answer.finish_reason is not None:
                        break
        finally:
            backend.release(sequence)
        for delta in answer.finish("cancelled" if job.cancel.is_set else "length"):
            self._deliver(job, delta)
        timings = Timings(
            queue_ms=(started - job.submitted) * 1e3,
            prefill_ms=(prefilled - started) * 1e3,
            ttft_ms=(times[0] - job.submitted) * 1e3 if times else 0.0,
            decode_ms=(times[-1] - times[0]) * 1e3 if times else 0.0,
            prefill_tokens=len(prompt) - 1,
            decode_tokens=len(times),
        )
        return Completion(
            text=answer.text,
            thinking=answer.thinking,
            token_ids=tuple(answer.token_ids),
            finish_reason=answer.finish_reason or "length",
            usage=Usage(len(prompt), answer.sampled_tokens),
            timings=timings,
            seed=job.sampling.seed,
            prompt_token_ids=prompt,
            logprobs=tuple(answer.logprobs) if job.params.logprobs is not None else None,
        )
