"""One thread owns the device. Requests take turns on it and answer through a callback."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import weakref
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any

import torch

from onekernel.config import EngineConfig, SamplingParams
from onekernel.engine.answer import Answer
from onekernel.engine.backend import Backend, DecodedToken
from onekernel.engine.gpu_claim import GpuClaim
from onekernel.engine.job import Deliver, Event, Job, Progress
from onekernel.engine.request import CancelToken, Constraint
from onekernel.engine.status import EngineStatus
from onekernel.engine.turns import Turns
from onekernel.errors import (
    ConfigError,
    ContextLengthError,
    DeviceError,
    EngineClosedError,
    MemoryLimitError,
    OnekernelError,
)
from onekernel.text.thinking import ThinkingSplitter
from onekernel.text.tokenizer import Tokenizer

__all__ = ["Deliver", "Engine", "Event", "Progress"]

_log = logging.getLogger(__name__)

_alive: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End what runs on a device before the interpreter goes, however it came to that."""
    for engine in list(_alive):
        engine.close()


class Engine:
    """Runs requests on a backend. Alone, an answer is one run of decode; several take turns of a slice of tokens each.

    `submit` may be called from any thread. A request's events are deltas, then one Completion, or an exception at any
    point; its callback is called on the engine's thread and must return quickly. A request that fails fails alone.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        generation_config: Mapping[str, Any],
        options: EngineConfig | None = None,
        claim: GpuClaim | None = None,
    ) -> None:
        self._claim = claim
        self.backend = backend
        self.tokenizer = tokenizer
        self.generation_config = generation_config
        self.options = options or EngineConfig()
        self.failure: BaseException | None = None
        self._turns = Turns(self.options.max_waiting)
        self._cancelled: queue.SimpleQueue[CancelToken] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="onekernel-engine", daemon=True)
        self._thread.start()
        _alive.add(self)

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
        self._refuse_if_failed()
        room = self.backend.max_context - len(prompt)
        job = Job(
            prompt=prompt,
            params=params,
            sampling=params.resolve(self.generation_config),
            limit=min(room, params.max_tokens or room),
            answer=Answer(self.tokenizer, params, self._ends(params), splitter, continues=continues),
            deliver=deliver,
            progress=progress,
            constraint=constraint,
            cancel=CancelToken(self._cancelled),
        )
        self._turns.join(job)
        return job.cancel

    def check_length(self, fewest: int) -> None:
        """Raise ContextLengthError if a prompt of at least so many tokens cannot fit, whatever it holds."""
        if fewest >= self.backend.max_context:
            raise self._too_long(fewest, at_least=True)

    def status(self) -> EngineStatus:
        """Return what the engine is doing. May be called from any thread, also after `close`."""
        use = self.backend.cache_use()
        running, waiting = self._turns.count()
        return EngineStatus(
            running=running,
            waiting=waiting,
            kv_pages_used=use.pages_used,
            kv_pages_cached=use.pages_cached,
            kv_pages_total=use.pages_total,
            prefix_hit_tokens=use.hit_tokens,
            prefix_query_tokens=use.query_tokens,
            failure=None if self.failure is None else str(self.failure),
            closed=self._turns.closed,
        )

    def close(self) -> None:
        """Cancel everything, wait for the thread, and free the device. A second call does nothing."""
        if not self._turns.close():
            return
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.backend.close()
        if self._claim is not None:
            self._claim.close()

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
            raise self._too_long(len(prompt))

    def _too_long(self, prompt_tokens: int, *, at_least: bool = False) -> ContextLengthError:
        limit = self.backend.config.context_limit
        return ContextLengthError(prompt_tokens, self.backend.max_context, limit, at_least=at_least)

    def _refuse_if_failed(self) -> None:
        if self.failure is not None:
            raise EngineClosedError(f"the engine failed earlier and takes no requests: {self.failure}")

    def _loop(self) -> None:
        while (job := self._turns.next()) is not None:
            try:
                self._refuse_if_failed()
                if self._turn(job):
                    self._finish(job)
                self._end_withdrawn()
            except BaseException as error:
                self._fail(job, error)
        for job in self._turns.clear():
            job.cancel.set()
            if job.sequence is not None:
                self._finish(job)
            else:
                self._deliver(job, EngineClosedError("the engine was closed before this request's first turn"))

    @staticmethod
    def _deliver(job: Job, event: Event) -> None:
        """Hand an event to the request's owner; an owner who is gone only loses his own request."""
        try:
            job.deliver(event)
        except BaseException:  # also SystemExit: the thread is everybody's
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
        # Torch names a lost context only in the text; in the text of our own errors a caller may have had a hand.
        ours = isinstance(error, OnekernelError)
        lost = error.context_lost if isinstance(error, DeviceError) else not ours and "CUDA error" in str(error)
        if lost and self.failure is None:
            self.failure = error  # a CUDA context does not recover; one whose kernel was stopped does not need to
        if not ours:
            _log.error("a request failed unexpectedly", exc_info=error)
        return error

    def _turn(self, job: Job) -> bool:
        """Give a request its turn; return whether it has ended, or else has been queued again."""
        if not self._begin(job):
            return False
        ended = self._prefill(job) and self._decode(job)
        if not ended:
            self._turns.again(job)
        return ended

    def _begin(self, job: Job) -> bool:
        """Reserve a request's pages, if it has none; return False if it has to wait for some."""
        if job.sequence is None:
            if self._turns.others_hold_pages and not self.backend.has_room(job.prompt, job.total_tokens):
                self._turns.set_aside(job)
                return False
            job.begin(self.backend.open(job.prompt, job.total_tokens))
        return True

    def _prefill(self, job: Job) -> bool:
        """Prefill what is left of the prompt, or one chunk while others wait; return whether that is all of it."""
        sequence, last = job.held, len(job.prompt) - 1
        if sequence.length >= last or job.cancel.is_set:
            return True
        began, before = time.perf_counter(), sequence.length
        self.backend.prefill(sequence, job.cancel, job.progress, self._others_wait)
        job.prefill_s += time.perf_counter() - began
        job.prefilled_tokens += sequence.length - before
        return sequence.length >= last or job.cancel.is_set

    def _decode(self, job: Job) -> bool:
        """Make tokens until the answer's end, or while others wait until the end of a slice; return whether it ended.

        Alone, a request decodes in one run. If somebody comes, the run is closed as soon as it has had its slice.
        """
        answer, slice_tokens, made = job.answer, self.options.slice_tokens, 0
        asked = min(job.left, slice_tokens) if self._others_wait() else job.left
        with closing(self._tokens(job, asked)) as tokens:
            for token in tokens:
                made += 1
                job.count_token()
                for delta in answer.push(token):
                    self._deliver(job, delta)
                if job.constraint is not None and answer.finish_reason is None:
                    job.constraint.accept(token.token_id)
                    if job.constraint.done:
                        answer.finish_reason = "stop"
                if answer.finish_reason is not None:
                    return True
                if self._others_wait() and made >= slice_tokens:
                    return job.left == 0 or job.cancel.is_set
        return made < asked or job.left == 0

    def _tokens(self, job: Job, limit: int) -> Generator[DecodedToken, None, None]:
        """Yield up to `limit` tokens: of one run, or with a constraint of a run for each."""
        decode, constraint, ends = self.backend.decode, job.constraint, job.answer.end_ids
        if constraint is None:
            yield from decode(job.held, job.sampling, limit, ends, job.cancel)
            return
        for _ in range(limit):
            if job.cancel.is_set:
                return
            yield from decode(job.held, job.sampling, 1, ends, job.cancel, constraint.mask())

    def _others_wait(self) -> bool:
        self._end_withdrawn()
        return self._turns.others

    def _end_withdrawn(self) -> None:
        """End the requests that were cancelled while they waited for a turn."""
        while not self._cancelled.empty():
            job = self._turns.withdraw(self._cancelled.get())
            if job is not None:
                self._finish(job)

    def _finish(self, job: Job) -> None:
        """Flush the answer, give the pages back and tell the owner."""
        try:
            for delta in job.answer.finish("cancelled" if job.cancel.is_set else "length"):
                self._deliver(job, delta)
            self._release(job)
            self._deliver(job, job.completion())
        except Exception as error:
            self._fail(job, error)

    def _fail(self, job: Job, error: BaseException) -> None:
        """Give the pages back, which may hold anything, and tell the owner."""
        self._release(job, failed=True)
        self._deliver(job, self._judge(error))

    def _release(self, job: Job, *, failed: bool = False) -> None:
        sequence, job.sequence = job.sequence, None
        if sequence is None:
            return
        try:
            self.backend.release(sequence, failed=failed)
        except Exception as error:  # without these pages somebody would wait for ever
            _log.error("the engine cannot give pages back and takes no more requests", exc_info=error)
            self.failure = error
        self._turns.pages_freed()
