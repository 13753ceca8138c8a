"""Time workloads through the engine, with random token ids."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, stdev

from onekernel.config import SamplingParams
from onekernel.engine.engine import Engine, Event
from onekernel.engine.request import Completion, Delta
from onekernel.measure.workload import Workload


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds of each repetition, and the time to the first token of the whole prompt, depth included."""

    workload: Workload
    seconds: tuple[float, ...]
    ttft_ms: tuple[float, ...]

    @property
    def rates(self) -> tuple[float, ...]:
        """Tokens per second of each repetition."""
        return tuple((self.workload.n_prompt + self.workload.n_gen) / taken for taken in self.seconds)

    @property
    def mean(self) -> float:
        """Mean of `rates`."""
        return fmean(self.rates)

    @property
    def deviation(self) -> float:
        """Sample standard deviation of `rates`; 0 for a single repetition."""
        return stdev(self.rates) if len(self.rates) > 1 else 0.0


def random_ids(count: int, vocab_limit: int, seed: int = 0) -> tuple[int, ...]:
    """Return `count` token ids below `vocab_limit`, the same for the same seed."""
    draw = random.Random(seed)
    return tuple(draw.randrange(vocab_limit) for _ in range(count))


def time_workload(engine: Engine, workload: Workload, repetitions: int, *, warm_up: bool = True) -> Result:
    """Time a workload `repetitions` times, each with other ids; a warm-up run before is not counted."""
    runs = [_run(engine, workload, seed) for seed in range(0 if warm_up else 1, repetitions + 1)]
    counted = runs[1:] if warm_up else runs
    return Result(workload, tuple(run[0] for run in counted), tuple(run[1] for run in counted))


def _run(engine: Engine, workload: Workload, seed: int) -> tuple[float, float]:
    """Return the seconds that count and the time to the first token in ms."""
    vocab_limit = min(engine.backend.config.vocab_size, engine.tokenizer.vocab_limit)
    ids = random_ids(workload.prompt_tokens, vocab_limit, seed)
    params = SamplingParams(
        max_tokens=max(1, workload.n_gen),
        temperature=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        ignore_eos=True,
        seed=0,
    )
    chunk_ends: dict[int, float] = {}

    def progress(done: int, total: int) -> None:
        chunk_ends[done] = time.perf_counter()

    completion, last_token = _answer(engine, ids, params, progress)
    timings = completion.timings
    decode_ms = timings.ttft_ms - timings.queue_ms - timings.prefill_ms + timings.decode_ms
    if not workload.n_prompt:
        return decode_ms / 1e3, timings.ttft_ms
    if workload.depth:
        return last_token - chunk_ends[workload.depth], timings.ttft_ms
    return (timings.prefill_ms + decode_ms) / 1e3, timings.ttft_ms


def _answer(
    engine: Engine, ids: tuple[int, ...], params: SamplingParams, progress: Callable[[int, int], None]
) -> tuple[Completion, float]:
    """Return the completion and the host time of its last token."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    last_token = 0.0

    def deliver(event: Event) -> None:
        nonlocal last_token
        if isinstance(event, Delta) and event.token_ids:
            last_token = time.perf_counter()
        events.put(event)

    engine.submit(ids, params, deliver, progress=progress)
    while isinstance(event := events.get(), Delta):
        pass
    if isinstance(event, BaseException):
        raise event
    return event, last_token
