"""Time workloads through the engine, with random token ids."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median, quantiles, stdev

from onekernel.config import SamplingParams
from onekernel.engine.engine import Engine, Event
from onekernel.engine.request import Completion, Delta
from onekernel.measure.workload import Workload


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds of each repetition, and the time to the first token of the whole prompt, depth included.

    intervals_us: of each repetition, the times between its tokens as this host sees them. energy_mj: what the device
    took in the seconds that count, if it was asked.
    """

    workload: Workload
    seconds: tuple[float, ...]
    ttft_ms: tuple[float, ...]
    intervals_us: tuple[tuple[float, ...], ...] = ()
    energy_mj: tuple[float, ...] | None = None

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

    @property
    def us_per_token(self) -> float | None:
        """Time from a repetition's first to its last token over the tokens after the first, median; None without."""
        means = [fmean(intervals) for intervals in self.intervals_us if intervals]
        return median(means) if means else None

    def interval_us(self, percent: int) -> float | None:
        """Return a percentile of the times between tokens, over all repetitions; None if there are none."""
        pooled = [interval for intervals in self.intervals_us for interval in intervals]
        if len(pooled) < 2:
            return pooled[0] if pooled else None
        return quantiles(pooled, n=100, method="inclusive")[percent - 1]

    @property
    def mj_per_token(self) -> float | None:
        """Millijoules for each token that is timed, mean over the repetitions; None if nobody asked."""
        if self.energy_mj is None:
            return None
        return fmean(self.energy_mj) / (self.workload.n_prompt + self.workload.n_gen)


@dataclass(slots=True)
class _Run:
    """What one repetition shows: host times in seconds and readings of the energy counter in mJ."""

    token_s: list[float] = field(default_factory=list)
    chunk_end_s: dict[int, float] = field(default_factory=dict)
    energy_mj: list[float] = field(default_factory=list)


def random_ids(count: int, vocab_limit: int, seed: int = 0) -> tuple[int, ...]:
    """Return `count` token ids below `vocab_limit`, the same for the same seed."""
    draw = random.Random(seed)
    return tuple(draw.randrange(vocab_limit) for _ in range(count))


def time_workload(
    engine: Engine,
    workload: Workload,
    repetitions: int,
    *,
    warm_up: bool = True,
    energy_mj: Callable[[], float] | None = None,
) -> Result:
    """Time a workload `repetitions` times, each with other ids; a warm-up run before is not counted.

    energy_mj: a counter of the device's energy, to be read at the ends of what is timed.
    """
    runs = [_run(engine, workload, seed, energy_mj) for seed in range(0 if warm_up else 1, repetitions + 1)]
    counted = runs[1:] if warm_up else runs
    return Result(
        workload,
        tuple(seconds for seconds, _, _ in counted),
        tuple(ttft_ms for _, ttft_ms, _ in counted),
        tuple(_intervals_us(run.token_s) for _, _, run in counted),
        tuple(run.energy_mj[-1] - run.energy_mj[0] for _, _, run in counted) if energy_mj else None,
    )


def _intervals_us(token_s: Sequence[float]) -> tuple[float, ...]:
    return tuple((later - earlier) * 1e6 for earlier, later in pairwise(token_s))


def _run(
    engine: Engine, workload: Workload, seed: int, energy_mj: Callable[[], float] | None
) -> tuple[float, float, _Run]:
    """Return the seconds that count, the time to the first token in ms, and what else was seen."""
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
    run = _Run()

    def read_energy() -> None:
        if energy_mj is not None:
            run.energy_mj.append(energy_mj())

    def progress(done: int, total: int) -> None:
        run.chunk_end_s[done] = time.perf_counter()
        if done == workload.depth:
            read_energy()  # what is timed begins here

    if not workload.depth:
        read_energy()
    completion = _answer(engine, ids, params, progress, run)
    read_energy()
    timings = completion.timings
    decode_ms = timings.ttft_ms - timings.queue_ms - timings.prefill_ms + timings.decode_ms
    if not workload.n_prompt:
        return decode_ms / 1e3, timings.ttft_ms, run
    if workload.depth:
        return run.token_s[-1] - run.chunk_end_s[workload.depth], timings.ttft_ms, run
    return (timings.prefill_ms + decode_ms) / 1e3, timings.ttft_ms, run


def _answer(
    engine: Engine, ids: tuple[int, ...], params: SamplingParams, progress: Callable[[int, int], None], run: _Run
) -> Completion:
    """Return the completion, and note in `run` when each token came."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def deliver(event: Event) -> None:
        if isinstance(event, Delta) and event.token_ids:
            run.token_s.append(time.perf_counter())
        events.put(event)

    engine.submit(ids, params, deliver, progress=progress)
    while isinstance(event := events.get(), Delta):
        pass
    if isinstance(event, BaseException):
        raise event
    return event
