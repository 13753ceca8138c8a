"""The engine on a scripted backend: text, limits, cancelling, failures, order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from onekernel.config import PREFILL_CHUNK_TOKENS, SamplingParams
from onekernel.engine.engine import Engine
from onekernel.engine.request import Completion
from onekernel.engine.stream import AnswerStream
from onekernel.errors import (
    ConfigError,
    ContextLengthError,
    DeviceError,
    EngineClosedError,
    MemoryLimitError,
    NumericError,
)
from tests.unit.engine.conftest import EOS, ScriptedBackend

Start = Callable[..., tuple[Engine, ScriptedBackend]]


def ask(engine: Engine, prompt: Sequence[int] = (72, 105), **params: Any) -> AnswerStream:
    return AnswerStream(lambda deliver: engine.submit(tuple(prompt), SamplingParams(**params), deliver))


def answer(engine: Engine, prompt: Sequence[int] = (72, 105), **params: Any) -> Completion:
    return ask(engine, prompt, **params).result()


def test_deltas_joined_are_the_completion(start: Start) -> None:
    text = "Grüße 👩‍🔬 aus Köln"
    engine, backend = start([*text.encode(), EOS])
    stream = ask(engine)
    deltas = list(stream)
    done = stream.completion
    assert done is not None
    assert "".join(delta.text for delta in deltas) == done.text == text
    assert [i for delta in deltas for i in delta.token_ids] == list(done.token_ids) == list(text.encode())
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    assert done.finish_reason == "stop"
    assert done.usage.prompt_tokens == 2
    assert done.usage.completion_tokens == len(text.encode()) + 1  # the end-of-sequence token was sampled too
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert backend.open_sequences == 0


def test_ignore_eos_goes_on_and_stop_token_ids_end(start: Start) -> None:
    engine, _ = start([65, EOS, 66, 67, 68])
    assert answer(engine, ignore_eos=True).token_ids == (65, EOS, 66, 67, 68)
    done = answer(engine, ignore_eos=True, stop_token_ids=(67,))
    assert (done.text, done.token_ids, done.finish_reason) == ("AB", (65, EOS, 66), "stop")


@pytest.mark.complaint("I3", file="engine/engine.py", old="params.max_tokens or room", new="params.max_tokens or 100")
def test_without_max_tokens_an_answer_may_fill_the_context(start: Start) -> None:
    engine, backend = start([65] * 500, max_context=300)
    done = answer(engine)
    assert backend.limits == [298]
    assert (done.usage.completion_tokens, done.finish_reason) == (298, "length")


@pytest.mark.complaint(
    "I4",
    file="engine/engine.py",
    old="limit=min(room, params.max_tokens or room)",
    new="limit=params.max_tokens or room",
)
def test_max_tokens_is_cut_to_what_is_left_of_the_context(start: Start) -> None:
    engine, backend = start([65] * 500, max_context=100)
    done = answer(engine, [72] * 90, max_tokens=50)
    assert backend.limits == [10]
    assert (done.usage.completion_tokens, done.finish_reason) == (10, "length")


@pytest.mark.complaint("I1", file="engine/engine.py", old="        if len(prompt) >= context:", new="        if False:")
def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers_and_the_flag(start: Start) -> None:
    engine, backend = start([65], max_context=100)
    with pytest.raises(ContextLengthError, match=r"100 tokens.*context of 100 tokens.*--ctx-size 101") as caught:
        ask(engine, [72] * 100)
    assert (caught.value.prompt_tokens, caught.value.max_context) == (100, 100)
    with pytest.raises(ContextLengthError, match=r"9000.*shorten.*8192"):
        ask(engine, [72] * 9000)
    assert backend.limits == []
    assert answer(engine, [72] * 99).usage.completion_tokens == 1


@pytest.mark.complaint("I2", file="engine/engine.py", old="        self._check(prompt, params)\n", new="")
@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        ((), {}, ConfigError, "empty"),
        ((1, 999), {}, ConfigError, "999"),
        ((1,), {"logit_bias": {300: 1.0}}, ConfigError, "300"),
        ((1,), {"stop_token_ids": (300,)}, ConfigError, "300"),
        ((1,) * 5000, {}, ContextLengthError, "5000"),
    ],
)
def test_bad_requests_fail_before_anything_is_queued(
    start: Start, prompt: tuple[int, ...], params: dict[str, Any], error: type[Exception], words: str
) -> None:
    engine, backend = start([65])
    with pytest.raises(error, match=words):
        ask(engine, prompt, **params)
    assert backend.limits == []


def test_stop_strings_end_the_answer_and_the_backend(start: Start) -> None:
    engine, backend = start(b"one two three four five six")
    done = answer(engine, stop=("three",))
    assert (done.text, done.finish_reason) == ("one two ", "stop")
    assert backend.yielded == len("one two three")


@pytest.mark.complaint(
    "H4",
    file="engine/answer.py",
    old="self._stops.push(self._detokenizer.finish()) + self._stops.flush()",
    new="self._stops.push(self._detokenizer.finish())",
)
def test_text_held_back_for_a_stop_string_is_flushed_at_the_limit(start: Start) -> None:
    engine, _ = start(b"one thr")
    done = answer(engine, stop=("three",), max_tokens=7)
    assert (done.text, done.finish_reason) == ("one thr", "length")


@pytest.mark.complaint(
    "H3",
    file="engine/answer.py",
    old="self.finish_reason = self.finish_reason or reason",
    new="self.finish_reason = reason",
)
def test_a_stop_string_complete_with_the_last_token_is_a_stop(start: Start) -> None:
    engine, _ = start(b"one three")
    done = answer(engine, stop=("three",), max_tokens=9)
    assert (done.text, done.finish_reason) == ("one ", "stop")


def test_an_answer_cut_inside_a_character_flushes_a_replacement(start: Start) -> None:
    engine, _ = start("Ö".encode())
    assert answer(engine, max_tokens=1).text == "\ufffd"


@pytest.mark.complaint("G4", file="engine/answer.py", old="tuple(raw), logprob, top", new="(), logprob, top")
def test_logprobs_carry_bytes_even_of_half_a_character(start: Start) -> None:
    engine, _ = start("Ö".encode())
    done = answer(engine, logprobs=2)
    assert done.logprobs is not None
    assert [lp.bytes for lp in done.logprobs] == [(0xC3,), (0x96,)]
    assert done.logprobs[0].logprob == -0.5
    assert [(top.token_id, top.text) for top in done.logprobs[0].top] == [(0xC3, "\ufffd"), (65, "A")]
    assert answer(engine).logprobs is None


def test_cancel_ends_between_tokens_and_keeps_what_there_is(start: Start) -> None:
    engine, backend = start([65] * 4000, delay_s=0.002)
    stream = ask(engine)
    for _ in range(3):
        next(stream)
    stream.cancel()
    done = stream.result()
    assert done.finish_reason == "cancelled"
    assert done.text.startswith("AAA") and len(done.text) < 1000
    assert backend.open_sequences == 0


def test_cancel_ends_between_prefill_chunks(start: Start) -> None:
    gate = threading.Event()
    engine, backend = start([65], max_context=8192, prefill_gate=gate)
    stream = ask(engine, [72] * 5000)
    stream.cancel()
    gate.set()
    assert stream.result().finish_reason == "cancelled"
    assert backend.chunks <= 1
    assert backend.limits == [] or backend.yielded == 0


def test_leaving_a_stream_frees_the_engine_for_the_next(start: Start) -> None:
    engine, backend = start([65] * 4000, delay_s=0.002)
    with ask(engine) as stream:
        next(stream)
    assert backend.open_sequences == 0
    dropped = ask(engine)
    next(dropped)
    del dropped
    began = time.perf_counter()
    assert answer(engine, max_tokens=3).text == "AAA"
    assert time.perf_counter() - began < 5


def test_progress_counts_chunks(start: Start) -> None:
    engine, _ = start([65], max_context=4096)
    seen: list[tuple[int, int]] = []
    prompt = (72,) * (PREFILL_CHUNK_TOKENS + 10)
    stream = AnswerStream(
        lambda deliver: engine.submit(prompt, SamplingParams(), deliver, progress=lambda *step: seen.append(step))
    )
    stream.result()
    assert seen == [(PREFILL_CHUNK_TOKENS, len(prompt) - 1), (len(prompt) - 1, len(prompt) - 1)]


def test_requests_run_in_order(start: Start) -> None:
    engine, _ = start(b"abc")
    order: list[int] = []
    streams = [
        AnswerStream(
            lambda deliver, n=n: engine.submit((1,), SamplingParams(), lambda e: (order.append(n), deliver(e)))  # type: ignore[misc,arg-type]
        )
        for n in range(5)
    ]
    assert [stream.result().text for stream in streams] == ["abc"] * 5
    assert order == sorted(order)


@pytest.mark.complaint(
    "C4",
    file="engine/engine.py",
    old="            return told\n",
    new="            self.failure = told\n            return told\n",
)
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_out_of_memory_fails_one_request_and_the_next_works(start: Start, error: Exception) -> None:
    engine, backend = start([65, error])
    with pytest.raises(MemoryLimitError, match="others go on"):
        answer(engine)
    backend.script.tokens = [66]
    assert answer(engine).text == "B"
    assert backend.open_sequences == 0


@pytest.mark.complaint(
    "E3",
    file="engine/engine.py",
    old="self._deliver(job, self._judge(error))",
    new="self._judge(error)",
)
@pytest.mark.timeout(20)
def test_non_finite_logits_end_the_request_with_an_error(start: Start) -> None:
    engine, backend = start([65, NumericError("3 of 260 logits are NaN")])
    stream = ask(engine)
    assert next(stream).text == "A"
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            stream.result()
        except NumericError as error:
            caught.append(error)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    waiter.join(5)
    assert caught and "NaN" in str(caught[0])
    backend.script.tokens = [66]
    assert answer(engine).text == "B"


def test_a_kernel_that_was_stopped_fails_one_request_and_the_next_works(start: Start) -> None:
    engine, backend = start([65, DeviceError("SM 7 waited for phase 3")])
    with pytest.raises(DeviceError, match="SM 7"):
        answer(engine)
    backend.script.tokens = [66]
    assert answer(engine).text == "B"
    assert backend.open_sequences == 0


def test_a_lost_device_closes_the_engine_with_its_reason(start: Start) -> None:
    engine, _ = start([65, DeviceError("SM 7 waited for phase 3", context_lost=True)])
    waiting = ask(engine)
    behind = ask(engine)
    for stream in (waiting,):
        with pytest.raises(DeviceError):
            stream.result()
    with pytest.raises(EngineClosedError, match="SM 7"):
        behind.result()
    with pytest.raises(EngineClosedError, match="SM 7"):
        ask(engine)


def test_close_cancels_what_runs_and_refuses_what_waits(start: Start) -> None:
    engine, backend = start([65] * 4000, delay_s=0.002)
    running, waiting = ask(engine), ask(engine)
    next(running)
    engine.close()
    engine.close()
    assert running.result().finish_reason == "cancelled"
    with pytest.raises(EngineClosedError):
        waiting.result()
    with pytest.raises(EngineClosedError, match="closed"):
        ask(engine)
    assert backend.closed and backend.open_sequences == 0


def test_text_of_a_caller_in_an_error_closes_nothing(start: Start) -> None:
    engine, backend = start([65, ConfigError("the schema says CUDA error")])
    with pytest.raises(ConfigError):
        answer(engine)
    backend.script.tokens = [66]
    assert answer(engine).text == "B"


@pytest.mark.parametrize("error", [RuntimeError("the loop is closed"), SystemExit(1)])
def test_a_callback_that_fails_loses_only_its_own_request(start: Start, error: BaseException) -> None:
    engine, backend = start([65] * 50)

    def deliver(event: object) -> None:
        raise error

    engine.submit((1,), SamplingParams(), deliver)
    assert answer(engine, max_tokens=2).text == "AA"
    assert backend.open_sequences == 0


@pytest.mark.complaint(
    "J4",
    file="engine/engine.py",
    old="params.resolve(self.generation_config)",
    new="SamplingParams(temperature=params.temperature).resolve(self.generation_config)",
)
def test_the_seed_used_is_returned_and_a_given_one_is_kept(start: Start) -> None:
    engine, backend = start([65])
    assert answer(engine, seed=7, temperature=1.0).seed == 7
    first, second = answer(engine, temperature=1.0).seed, answer(engine, temperature=1.0).seed
    assert first != second
    assert [s.seed for s in backend.samplings] == [7, first, second]
    assert all(s.temperature == 1.0 for s in backend.samplings)


def test_timings_add_up(start: Start) -> None:
    engine, _ = start([65] * 5, delay_s=0.01)
    timings = answer(engine, [72] * 700, max_tokens=5).timings
    assert timings.decode_tokens == 5 and timings.prefill_tokens == 699
    assert timings.decode_ms >= 35 and timings.ttft_ms >= 10
    assert timings.decode_tokens_per_s == pytest.approx(4e3 / timings.decode_ms)


@pytest.mark.timeout(20)
def test_a_request_from_a_callback_is_refused_instead_of_waiting_for_itself(start: Start) -> None:
    engine, _ = start([65, 66])
    caught: list[BaseException] = []

    def progress(done: int, total: int) -> None:
        try:
            ask(engine)
        except EngineClosedError as error:
            caught.append(error)

    stream = AnswerStream(lambda deliver: engine.submit((1, 2, 3), SamplingParams(), deliver, progress=progress))
    assert stream.result().text == "AB"
    assert "own thread" in str(caught[0])


def test_of_a_long_prompt_a_lower_bound_is_enough_to_refuse_it(start: Start) -> None:
    engine, _ = start(b"")
    for fewest in (0, 4095):
        engine.check_length(fewest)
    with pytest.raises(ContextLengthError, match=r"at least 4096 tokens .* a context of 4096"):
        engine.check_length(4096)
