"""Speed of prefill and decode in llama-bench's vocabulary, measured through the engine with random token ids.

pp512: time of a 512-token prompt up to its first token. tg128: time of 128 decode steps. pp512+tg128: both together.
`@ d4096`: with 4,096 tokens in the cache already, whose own prefill is not counted.
"""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from onekernel.config import PREFILL_CHUNK_TOKENS, SamplingParams
from onekernel.engine.engine import Engine, Event
from onekernel.engine.request import Completion, Delta
from onekernel.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Test:
    """What is timed: a prompt of n_prompt tokens, then n_gen decode steps, after `depth` tokens."""

    n_prompt: int
    n_gen: int
    depth: int = 0

    def __post_init__(self) -> None:
        if min(self.n_prompt, self.n_gen, self.depth) < 0 or self.n_prompt + self.n_gen == 0:
            raise ConfigError(
                f"a test has {self.n_prompt} prompt and {self.n_gen} answer tokens at depth {self.depth}; "
                "none may be negative, and prompt and answer not both 0"
            )
        if self.n_prompt and self.depth % PREFILL_CHUNK_TOKENS:
            raise ConfigError(
                f"--n-depth is {self.depth}; with a prompt it must be a multiple of {PREFILL_CHUNK_TOKENS}, because "
                "prefill works in chunks of that size and is timed from the end of one"
            )

    @property
    def name(self) -> str:
        """The name llama-bench gives it."""
        parts = [f"pp{self.n_prompt}"] * (self.n_prompt > 0) + [f"tg{self.n_gen}"] * (self.n_gen > 0)
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt that is submitted.

        Prefill leaves the last prompt token to decode, so a test with decode steps has one token more: n_prompt tokens
        are prefilled and n_gen steps decoded, as in llama-bench.
        """
        return self.depth + self.n_prompt + (self.n_gen > 0)

    @property
    def context(self) -> int:
        """The context it needs."""
        return self.prompt_tokens + max(1, self.n_gen)


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds of each repetition, and the time to the first token of the whole prompt, depth included."""

    test: Test
    seconds: tuple[float, ...]
    ttft_ms: tuple[float, ...]

    @property
    def rates(self) -> tuple[float, ...]:
        """Tokens per second of each repetition."""
        return tuple((self.test.n_prompt + self.test.n_gen) / taken for taken in self.seconds)

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


def run_test(engine: Engine, test: Test, repetitions: int, *, warm_up: bool = True) -> Result:
    """Time a test `repetitions` times, each with other ids; a warm-up run before is not counted."""
    runs = [_run(engine, test, seed) for seed in range(0 if warm_up else 1, repetitions + 1)]
    counted = runs[1:] if warm_up else runs
    return Result(test, tuple(run[0] for run in counted), tuple(run[1] for run in counted))


def plan_tests(
    n_prompt: Sequence[int], n_gen: Sequence[int], pairs: Sequence[tuple[int, int]], depths: Sequence[int]
) -> list[Test]:
    """Return the tests in llama-bench's order: for each depth the prompts, the answers, the pairs; zeros are left out.

    Raises ConfigError if none is left.
    """
    tests = []
    for depth in depths:
        tests += [Test(count, 0, depth) for count in n_prompt if count]
        tests += [Test(0, count, depth) for count in n_gen if count]
        tests += [Test(prompt, answer, depth) for prompt, answer in pairs]
    if not tests:
        raise ConfigError("no test is left: -p and -n are 0 and there is no -pg")
    return tests


def _run(engine: Engine, test: Test, seed: int) -> tuple[float, float]:
    """Return the seconds that count and the time to the first token in ms."""
    ids = random_ids(test.prompt_tokens, min(engine.backend.config.vocab_size, engine.tokenizer.vocab_limit), seed)
    params = SamplingParams(
        max_tokens=max(1, test.n_gen),
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
    if not test.n_prompt:
        return decode_ms / 1e3, timings.ttft_ms
    if test.depth:
        return last_token - chunk_ends[test.depth], timings.ttft_ms
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
