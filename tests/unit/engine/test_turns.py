"""Who has the device, and for how long: counted in tokens, on a scripted backend that waits at gates."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any

import pytest
import torch

from onekernel.config import PREFILL_CHUNK_TOKENS, EngineConfig, SamplingParams
from onekernel.engine.engine import Engine
from onekernel.engine.stream import AnswerStream
from onekernel.errors import DeviceError, EngineClosedError, MemoryLimitError, QueueFullError
from tests.unit.engine.conftest import EOS, VOCAB, ScriptedBackend

Start = Callable[..., tuple[Engine, ScriptedBackend]]
SLICE = 8


def ask(engine: Engine, owner: int, tokens: int = 100, prompt: int = 2, constraint: Any = None) -> AnswerStream:
    """`owner` is the prompt's first token and what the backend's trace shows."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    ids = (owner, *[7] * (prompt - 1))
    return AnswerStream(lambda deliver: engine.submit(ids, params, deliver, constraint=constraint))


def gated(start: Start, at: int = 0, **options: Any) -> tuple[Engine, ScriptedBackend, threading.Event]:
    """An engine whose backend waits before its token number `at`, counted over all requests."""
    settings = EngineConfig(slice_tokens=SLICE, **options.pop("config", {}))
    engine, backend = start([65] * 4000, settings=settings, **options)
    backend.gates[at] = threading.Event()
    return engine, backend, backend.gates[at]


def runs(trace: list[int]) -> list[tuple[int, int]]:
    """Owner and length of each run of tokens; chunks of prefill left out."""
    return [(owner, len(list(run))) for owner, run in groupby(owner for owner in trace if owner > 0)]


def test_alone_an_answer_is_one_run(start: Start) -> None:
    engine, backend, gate = gated(start)
    gate.set()
    assert len(ask(engine, 1, 100).result().token_ids) == 100
    assert backend.limits == [100]


@pytest.mark.parametrize("clients", [2, 3, 5])
def test_nobody_waits_for_more_tokens_than_a_slice_of_each_other(start: Start, clients: int) -> None:
    engine, backend, gate = gated(start)
    streams = [ask(engine, owner, 50) for owner in range(1, clients + 1)]
    gate.set()
    assert [len(stream.result().token_ids) for stream in streams] == [50] * clients
    turns = runs(backend.trace)
    assert [owner for owner, _ in turns[: 2 * clients]] == list(range(1, clients + 1)) * 2
    assert all(length == SLICE for _, length in turns[: 6 * clients])
    for owner in range(1, clients + 1):
        mine = [index for index, who in enumerate(who for who in backend.trace if who > 0) if who == owner]
        waits = [mine[0], *(later - earlier - 1 for earlier, later in pairwise(mine))]
        assert max(waits) <= (clients - 1) * SLICE


def test_a_long_run_ends_soon_after_somebody_comes(start: Start) -> None:
    engine, backend, gate = gated(start, at=103)
    first = ask(engine, 1, 200)
    for _ in range(100):
        next(first)
    second = ask(engine, 2, 5)
    gate.set()
    assert len(second.result().token_ids) == 5
    assert len(first.result().token_ids) == 200
    before = backend.trace.index(2) - 1  # its own chunk of prefill
    assert 100 <= before <= 100 + SLICE
    assert backend.limits[:2] == [200, 5]


def test_a_prefill_lets_others_in_after_each_chunk(start: Start) -> None:
    engine, backend, gate = gated(start, max_context=8192)
    short, long = ask(engine, 1, 60), ask(engine, 2, 4, prompt=4 * PREFILL_CHUNK_TOKENS + 1)
    gate.set()
    assert long.result().timings.prefill_tokens == 4 * PREFILL_CHUNK_TOKENS
    short.result()
    chunks = [index for index, who in enumerate(backend.trace) if who == -2]
    assert len(chunks) == 4
    assert all(later - earlier == SLICE + 1 for earlier, later in pairwise(chunks))
    assert backend.trace[chunks[-1] + 1] == 2  # the last chunk and the first tokens are one turn


def test_alone_a_prefill_is_not_cut(start: Start) -> None:
    engine, backend = start([65], max_context=8192)
    ask(engine, 1, 1, prompt=5000).result()
    assert backend.trace == [-1] * 10 + [1]


def test_a_waiting_request_that_is_cancelled_leaves_at_once(start: Start) -> None:
    """While another one is stuck inside a token, it no longer counts; it is told as soon as that token is there."""
    engine, backend, gate = gated(start, at=3)
    running, waiting = ask(engine, 1, 2000), ask(engine, 2)
    for _ in range(3):
        next(running)
    assert (engine.status().running, engine.status().waiting) == (1, 1)
    waiting.cancel()
    assert engine.status().waiting == 0
    gate.set()
    done = waiting.result()
    assert (done.finish_reason, done.text, done.usage.completion_tokens) == ("cancelled", "", 0)
    assert 2 not in backend.trace and -2 not in backend.trace
    running.close()


def test_a_request_cancelled_between_its_turns_gives_its_pages_back_at_once(start: Start) -> None:
    engine, backend, gate = gated(start, at=2 * SLICE + 2)
    streams = [ask(engine, owner, 1000) for owner in (1, 2, 3)]
    for _ in range(SLICE):
        next(streams[1])
    streams[1].cancel()
    gate.set()
    done = streams[1].result()
    assert (done.finish_reason, len(done.token_ids)) == ("cancelled", SLICE)
    assert backend.trace.count(2) == SLICE
    for stream in streams:
        stream.close()
    assert backend.open_sequences == 0


def test_a_full_queue_refuses_with_its_numbers(start: Start) -> None:
    engine, _, gate = gated(start, config={"max_waiting": 2})
    running = ask(engine, 1)
    while engine.status().running == 0:
        pass
    waiting = [ask(engine, 2), ask(engine, 3)]
    with pytest.raises(QueueFullError, match=r"2 requests wait and at most 2 may.*--max-waiting") as caught:
        ask(engine, 4)
    assert (caught.value.waiting, caught.value.limit) == (2, 2)
    waiting[0].cancel()
    late = ask(engine, 4)
    gate.set()
    assert [len(stream.result().token_ids) for stream in (running, waiting[1], late)] == [100] * 3


def test_with_no_queue_an_idle_engine_still_answers(start: Start) -> None:
    engine, _, gate = gated(start, config={"max_waiting": 0})
    running = ask(engine, 1)
    with pytest.raises(QueueFullError):
        ask(engine, 2)
    gate.set()
    running.result()


def test_requests_without_pages_wait_in_order_and_do_not_fail(start: Start) -> None:
    engine, backend, gate = gated(start, room=2)
    streams = [ask(engine, owner, 20) for owner in range(1, 7)]
    gate.set()
    assert [len(stream.result().token_ids) for stream in streams] == [20] * 6
    firsts = [backend.trace.index(owner) for owner in range(1, 7)]
    assert firsts == sorted(firsts)
    assert backend.open_sequences == 0
    assert all(length <= SLICE or owner == 6 for owner, length in runs(backend.trace))


@pytest.mark.timeout(30)
def test_pages_that_never_come_are_an_error_and_no_wait(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, backend = start([65], room=0)

    def full(prompt: object, total_tokens: int) -> None:
        raise MemoryLimitError("7 pages are needed and 0 are free", 7, 0, 0)

    monkeypatch.setattr(backend, "open", full)
    with pytest.raises(MemoryLimitError, match="7 pages"):
        ask(engine, 1).result()


@pytest.mark.timeout(30)
def test_close_tells_everybody(start: Start) -> None:
    engine, backend, gate = gated(start, at=2 * SLICE + 1, room=3)
    streams = [ask(engine, owner, 1000) for owner in (1, 2, 3, 4, 5)]
    for _ in range(SLICE):
        next(streams[1])
    closer = threading.Thread(target=engine.close)
    closer.start()
    while not engine.status().closed:
        pass
    gate.set()
    closer.join(10)
    for stream, count in zip(streams[:3], (SLICE, SLICE, None), strict=True):
        done = stream.result()
        assert done.finish_reason == "cancelled"
        assert count is None or len(done.token_ids) == count
    for stream in streams[3:]:
        with pytest.raises(EngineClosedError, match="before this request's first turn"):
            stream.result()
    assert backend.closed and backend.open_sequences == 0
    assert engine.status().closed and engine.status().running == engine.status().waiting == 0


def test_a_lost_device_tells_everybody_who_had_a_turn(start: Start) -> None:
    engine, backend, gate = gated(start)
    script = list(backend.script.tokens)
    script[SLICE + 1] = DeviceError("SM 7 waited", context_lost=True)
    backend.script.tokens = script
    streams = [ask(engine, owner) for owner in (1, 2, 3)]
    gate.set()
    with pytest.raises(DeviceError, match="SM 7"):
        streams[0].result()
    for stream in streams[1:]:
        with pytest.raises(EngineClosedError, match="SM 7"):
            stream.result()
    assert backend.open_sequences == 0
    assert engine.status().failure == "SM 7 waited"
    assert backend.released == [(1, True), (2, True), (3, True)]


def test_later_requests_are_told_the_first_failure_and_no_chain_of_them(start: Start) -> None:
    engine, backend, gate = gated(start)
    backend.script.tokens = [RuntimeError("CUDA error: an illegal memory access")]
    streams = [ask(engine, owner) for owner in (1, 2, 3)]
    gate.set()
    with pytest.raises(RuntimeError, match=r"^CUDA error"):
        streams[0].result()
    for stream in streams[1:]:
        with pytest.raises(EngineClosedError, match=r"^the engine failed earlier and takes no requests: CUDA error"):
            stream.result()


@pytest.mark.timeout(30)
def test_a_backend_that_cannot_give_pages_back_closes_the_engine_instead_of_hanging(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, backend = start([65])
    give_back = backend.release
    monkeypatch.setattr(backend, "release", lambda *args, **options: 1 / 0)
    assert len(ask(engine, 1).result().token_ids) == 1
    with pytest.raises(EngineClosedError, match="division by zero"):
        ask(engine, 2)
    monkeypatch.setattr(backend, "release", give_back)


class Alternating:
    """Allows only token 65, then only 66, and so on, until `length` tokens are there."""

    def __init__(self, length: int) -> None:
        self.length, self.accepted = length, list[int]()

    def mask(self) -> torch.Tensor:
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        mask[65 + len(self.accepted) % 2] = True
        return mask

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    @property
    def done(self) -> bool:
        return len(self.accepted) >= self.length


def test_a_constraint_is_asked_before_every_token_and_ends_the_answer(start: Start) -> None:
    engine, backend = start([65, 66] * 100, settings=EngineConfig(slice_tokens=SLICE))
    rule = Alternating(20)
    done = ask(engine, 1, 100, constraint=rule).result()
    assert (done.text, done.finish_reason) == ("AB" * 10, "stop")
    assert rule.accepted == [65, 66] * 10
    assert backend.limits == [1] * 20
    assert [int(mask.nonzero()[0]) for mask in backend.masks if mask is not None] == [65, 66] * 10


def test_an_answer_cut_before_its_constraint_is_done_says_length(start: Start) -> None:
    engine, _ = start([65, 66] * 100)
    assert ask(engine, 1, 5, constraint=Alternating(20)).result().finish_reason == "length"


def test_an_end_of_sequence_token_is_not_handed_to_the_constraint(start: Start) -> None:
    engine, _ = start([65, EOS])
    rule = Alternating(20)
    stream = AnswerStream(lambda deliver: engine.submit((1,), SamplingParams(), deliver, constraint=rule))
    assert stream.result().finish_reason == "stop"
    assert rule.accepted == [65]


def test_constrained_requests_take_turns_too(start: Start) -> None:
    engine, backend, gate = gated(start)
    streams = [ask(engine, owner, 100, constraint=Alternating(30)) for owner in (1, 2)]
    gate.set()
    assert [len(stream.result().token_ids) for stream in streams] == [30, 30]
    assert all(length <= SLICE for _, length in runs(backend.trace)[:6])


def test_a_constraint_that_fails_fails_its_own_request(start: Start) -> None:
    class Broken(Alternating):
        def accept(self, token_id: int) -> None:
            raise ValueError("not in the grammar")

    engine, backend = start([65] * 50)
    with pytest.raises(ValueError, match="grammar"):
        ask(engine, 1, constraint=Broken(5)).result()
    assert len(ask(engine, 2, 10).result().token_ids) == 10
    assert backend.released == [(1, True), (2, False)]
