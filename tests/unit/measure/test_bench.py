"""Timing through a real engine whose backend moves the clock itself, so that every time is known."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from onekernel.config import PREFILL_CHUNK_TOKENS, ModelConfig, Sampling
from onekernel.engine.backend import DecodedToken, MemoryReport, never
from onekernel.engine.engine import Engine
from onekernel.engine.request import CancelToken
from onekernel.engine.status import CacheUse
from onekernel.errors import NumericError
from onekernel.measure.bench import Result, random_ids, time_workload
from onekernel.measure.workload import Workload
from onekernel.text.tokenizer import Tokenizer

CHUNK_S, STEP_S = 3.0, 0.25


class Clockwork:
    """A backend that takes a fixed time for each prefill chunk and each decode step, and the clock that shows it."""

    name, device, max_context = "clockwork", "cpu", 8192
    config = ModelConfig("LlamaForCausalLM", 64, 128, 2, 4, 2, 16, 300, 8192)
    memory = MemoryReport(0, 0, 0)

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.broken = False
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def open(self, prompt: Sequence[int], total_tokens: int) -> Any:
        self.prompts.append(list(prompt))
        return SimpleNamespace(length=0, prompt=prompt)

    def cache_use(self) -> CacheUse:
        return CacheUse()

    def has_room(self, prompt: Sequence[int], total_tokens: int) -> bool:
        return True

    def prefill(
        self,
        sequence: Any,
        cancel: CancelToken,
        progress: Callable[[int, int], None],
        pause: Callable[[], bool] = never,
    ) -> None:
        total = len(sequence.prompt) - 1
        while sequence.length < total:
            self.now += CHUNK_S
            sequence.length = min(total, sequence.length + PREFILL_CHUNK_TOKENS)
            progress(sequence.length, total)

    def decode(
        self,
        sequence: Any,
        sampling: Sampling,
        limit: int,
        stop_ids: frozenset[int],
        cancel: CancelToken,
        mask: object = None,
    ) -> Generator[DecodedToken, None, None]:
        self.samplings.append(sampling)
        assert not stop_ids
        for token_id in range(limit):
            self.now += STEP_S
            if self.broken:
                raise NumericError("the logits are not finite")
            yield DecodedToken(token_id)

    def release(self, sequence: Any, *, failed: bool = False) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    backend = Clockwork()
    for module in ("engine.engine", "engine.job"):
        monkeypatch.setattr(f"onekernel.{module}.time", backend)
    monkeypatch.setattr("onekernel.measure.bench.time", backend)
    sampled = {"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.3}
    engine = Engine(backend, Tokenizer.placeholder(300), sampled)
    yield engine
    engine.close()


def backend_of(engine: Engine) -> Clockwork:
    assert isinstance(engine.backend, Clockwork)
    return engine.backend


@pytest.mark.parametrize(
    ("workload", "seconds"),
    [
        (Workload(512, 0), CHUNK_S + STEP_S),  # 511 prefilled tokens and the step that gives the first one
        (Workload(0, 4), 4 * STEP_S),
        (Workload(512, 4), CHUNK_S + 4 * STEP_S),
        (Workload(512, 0, 1024), CHUNK_S + STEP_S),
        (Workload(0, 4, 1000), 4 * STEP_S),
        (Workload(512, 4, 1024), CHUNK_S + 4 * STEP_S),
    ],
    ids=lambda value: value.name if isinstance(value, Workload) else "",
)
def test_only_what_the_workload_names_is_timed(engine: Engine, workload: Workload, seconds: float) -> None:
    result = time_workload(engine, workload, 2)
    # The engine notes when a request came by the real clock: a difference of two large numbers is in the sum.
    assert result.seconds == pytest.approx((seconds, seconds), rel=1e-6)
    assert result.rates[0] == pytest.approx((workload.n_prompt + workload.n_gen) / seconds)


def test_times_between_tokens_are_those_of_the_counted_runs(engine: Engine) -> None:
    result = time_workload(engine, Workload(512, 4), 3)
    assert [len(intervals) for intervals in result.intervals_us] == [3, 3, 3]
    for found in (result.us_per_token, result.interval_us(50), result.interval_us(99)):
        assert found == pytest.approx(STEP_S * 1e6)
    assert time_workload(engine, Workload(512, 0), 1).us_per_token is None
    assert time_workload(engine, Workload(512, 0), 1).interval_us(99) is None


def test_percentiles_are_pooled_over_the_repetitions() -> None:
    result = Result(Workload(0, 51), (1.0, 1.0), (1.0, 1.0), (tuple(range(1, 51)), tuple(range(51, 101))))
    assert result.us_per_token == pytest.approx(50.5)
    assert result.interval_us(50) == pytest.approx(50.5)
    assert result.interval_us(99) == pytest.approx(99.01)


@pytest.mark.parametrize(
    ("workload", "timed_s"), [(Workload(0, 4), 4 * STEP_S), (Workload(512, 4, 1024), CHUNK_S + 4 * STEP_S)]
)
def test_energy_is_read_at_the_ends_of_what_is_timed(engine: Engine, workload: Workload, timed_s: float) -> None:
    watts = 300.0
    backend = backend_of(engine)
    result = time_workload(engine, workload, 2, energy_mj=lambda: backend.now * watts * 1e3)
    assert result.energy_mj == pytest.approx((timed_s * watts * 1e3,) * 2)
    assert result.mj_per_token == pytest.approx(timed_s * watts * 1e3 / (workload.n_prompt + workload.n_gen))


def test_a_run_to_warm_up_is_not_counted(engine: Engine) -> None:
    backend = backend_of(engine)
    assert len(time_workload(engine, Workload(8, 1), 2).seconds) == 2
    assert len(backend.prompts) == 3
    time_workload(engine, Workload(8, 1), 2, warm_up=False)
    assert len(backend.prompts) == 5


def test_ids_are_random_but_the_same_every_time(engine: Engine) -> None:
    backend = backend_of(engine)
    time_workload(engine, Workload(8, 1), 2)
    first = list(backend.prompts)
    backend.prompts.clear()
    time_workload(engine, Workload(8, 1), 2)
    assert backend.prompts == first
    assert len({tuple(prompt) for prompt in first}) == 3
    assert all(0 <= token < 300 for prompt in first for token in prompt)


def test_the_models_own_sampling_is_left_out(engine: Engine) -> None:
    time_workload(engine, Workload(0, 1), 1)
    for sampling in backend_of(engine).samplings:
        assert sampling.greedy
        assert not sampling.penalised


def test_a_failure_is_raised(engine: Engine) -> None:
    backend_of(engine).broken = True
    with pytest.raises(NumericError):
        time_workload(engine, Workload(0, 1), 1)


def test_mean_and_deviation() -> None:
    result = Result(Workload(10, 0), (1.0, 2.0), (5.0, 5.0))
    assert result.mean == pytest.approx(7.5)
    assert result.deviation == pytest.approx(((10 - 7.5) ** 2 + (5 - 7.5) ** 2) ** 0.5)
    assert Result(Workload(10, 0), (1.0,), (5.0,)).deviation == 0.0


def test_random_ids_stay_below_the_limit() -> None:
    assert set(random_ids(1000, 3)) == {0, 1, 2}
    assert random_ids(50, 1000) == random_ids(50, 1000) != random_ids(50, 1000, seed=1)
