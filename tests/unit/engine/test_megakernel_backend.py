"""The megakernel as the engine's backend, on the shim: the reference's answers, one launch each, and no way to hang."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from onekernel.config import Sampling, SamplingParams
from onekernel.device.shim import ShimKernel
from onekernel.device.shim_build import find_host_compiler
from onekernel.engine.backend import MemoryReport
from onekernel.engine.engine import Engine
from onekernel.engine.megakernel_backend import MegakernelBackend
from onekernel.engine.paged_backend import PagedSequence
from onekernel.engine.request import CancelToken, Completion
from onekernel.engine.running_launch import STUCK_EXIT_CODE, Patience
from onekernel.engine.stream import AnswerStream
from onekernel.errors import ConfigError, DeviceError, NumericError
from onekernel.models.model import Model
from onekernel.phases.choose import TokenCounts, choose
from onekernel.plan.abi import MAX_LAUNCH_TOKENS
from onekernel.text.tokenizer import Tokenizer
from tests.megakernels import (
    Reference,
    ThreadedKernel,
    ThreadedMegakernel,
    checkpoint_of,
    packed_of,
    prompt_of,
    put_together,
    small_plan,
    weights_of,
)

pytestmark = pytest.mark.xdist_group("transformers")

NAMES = ["llama-dynamic", "llama-bias", "qwen2"]
"""More models that the same build of the kernel serves; tests/shim has all."""

PROMPT_TOKENS = 70
PATIENCE = Patience(token_s=20.0, stop_s=20.0)


class Rig:
    """A backend on the shim, the kernel that counts its launches, and the reference."""

    def __init__(self, name: str, folder: Any, launch_tokens: int = 4096, **changes: Any) -> None:
        find_host_compiler()
        checkpoint, self.config = checkpoint_of(name, folder, **changes)
        plan = small_plan(self.config)
        packed = packed_of(checkpoint, plan)
        megakernel = put_together(
            plan, packed, lambda spec: ThreadedKernel(ShimKernel(spec, timeout_s=100.0)), ThreadedMegakernel
        )
        assert isinstance(megakernel, ThreadedMegakernel)
        self.megakernel, self.kernel = megakernel, megakernel.kernel
        self.backend = MegakernelBackend(
            megakernel, memory=MemoryReport(0, 0, 0), launch_tokens=launch_tokens, patience=PATIENCE
        )
        self.reference = Reference(Model(self.config, weights_of(checkpoint, self.config)))
        self.prompt = prompt_of(self.config, PROMPT_TOKENS)

    def decode(
        self,
        limit: int,
        *,
        sampling: Sampling | None = None,
        stop_ids: frozenset[int] = frozenset(),
        backend: MegakernelBackend | None = None,
    ) -> tuple[list[int], PagedSequence]:
        """Answer the prompt and return the tokens, and the sequence as decode left it."""
        backend = backend or self.backend
        sequence = backend.open(self.prompt, PROMPT_TOKENS + limit)
        assert isinstance(sequence, PagedSequence)
        try:
            backend.prefill(sequence, CancelToken(), lambda done, total: None)
            tokens = backend.decode(sequence, sampling or Sampling(), limit, stop_ids, CancelToken())
            return [token.token_id for token in tokens], sequence
        finally:
            backend.release(sequence)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def answer(rig: Rig) -> list[int]:
    """Eight greedy tokens, in one launch."""
    tokens, _ = rig.decode(8)
    rig.reference.check_greedy(rig.prompt, tokens)
    assert len(set(tokens)) > 4
    return tokens


@pytest.fixture
def engine(rig: Rig) -> Iterator[Engine]:
    engine = Engine(KeepOpen(rig.backend), Tokenizer.placeholder(rig.config.vocab_size), {})
    yield engine
    engine.close()


class KeepOpen:
    """The backend, for an engine that must not free it."""

    def __init__(self, backend: MegakernelBackend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def close(self) -> None:
        pass


def ask(engine: Engine, prompt: list[int], **params: Any) -> AnswerStream:
    settings = SamplingParams(**{"ignore_eos": True, "temperature": 0.0, **params})
    return AnswerStream(lambda deliver: engine.submit(tuple(prompt), settings, deliver))


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_the_reference_across_launches(name: str, tmp_path: Any) -> None:
    """Dynamic RoPE is stretched to what the request may become, which the table of the whole context is not."""
    rig = Rig(name, tmp_path, launch_tokens=3, **({"max_position_embeddings": 32} if "dynamic" in name else {}))
    rig.reference.context = PROMPT_TOKENS + 7
    tokens, sequence = rig.decode(7)
    assert len(tokens) == 7 and rig.kernel.launches == 3
    rig.reference.check_greedy(rig.prompt, tokens)
    assert sequence.tokens == rig.prompt + tokens
    assert sequence.length == PROMPT_TOKENS + 6  # the last token is not in the cache


def test_a_greedy_answer_is_one_launch_and_the_next_one_the_same(rig: Rig, engine: Engine, answer: list[int]) -> None:
    """Prefill is PyTorch's. The pages of the second request are those of the first; what these left there is poison."""
    for _ in range(2):
        before = rig.kernel.launches
        done: Completion = ask(engine, rig.prompt, max_tokens=8).result()
        assert rig.kernel.launches - before == 1
        assert list(done.token_ids) == answer
        assert (done.finish_reason, done.usage.completion_tokens) == ("length", 8)
        rig.megakernel.cache.pages.fill_(float("nan"))


def test_limits_of_a_launch_change_nothing(rig: Rig, answer: list[int]) -> None:
    short = MegakernelBackend(rig.megakernel, memory=MemoryReport(0, 0, 0), launch_tokens=3, patience=PATIENCE)
    before = rig.kernel.launches
    assert rig.decode(8, backend=short)[0] == answer
    assert rig.kernel.launches - before == 3


def test_a_launch_makes_no_more_tokens_than_there_are_slots(rig: Rig) -> None:
    before = rig.kernel.launches
    table = torch.zeros(1, rig.megakernel.plan.limits.table_pages, dtype=torch.int32)
    for limit in (0, MAX_LAUNCH_TOKENS + 1):
        with pytest.raises(ConfigError, match=f"limit is {limit}; one launch makes 1 to 4096 tokens"):
            rig.megakernel.launch([1], [0], table, limit)
    with pytest.raises(ConfigError, match="65 stop token ids were given; the kernel takes at most 64"):
        rig.megakernel.launch([1], [0], table, 1, stop_ids=range(65))
    assert rig.kernel.launches == before


def test_reading_tokens_calls_nothing_of_cuda(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory is read through NumPy: once a launch runs, its tokens and reports need no tensor's help."""
    sequence = rig.backend.open(rig.prompt, PROMPT_TOKENS + 4)
    rig.backend.prefill(sequence, CancelToken(), lambda done, total: None)
    sampling = Sampling(temperature=1.0, top_k=5, seed=2, logprobs=3)
    tokens = rig.backend.decode(sequence, sampling, 4, frozenset(), CancelToken())
    made = [next(tokens)]

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a tensor was touched while tokens are read")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__getitem__", "to", "cpu", "copy_", "zero_"):
            patch.setattr(torch.Tensor, name, forbidden)
        made += [next(tokens) for _ in range(3)]
    tokens.close()
    rig.backend.release(sequence)
    assert [len(token.top) for token in made] == [3] * 4


@pytest.mark.parametrize("stop_ids", [0, 100])
def test_a_stop_id_ends_the_launch(rig: Rig, answer: list[int], stop_ids: int) -> None:
    """Also one of more ids than the kernel takes, which the host then finds."""
    stop = answer[4]
    others = frozenset(range(stop_ids)) - frozenset(answer)
    tokens, sequence = rig.decode(8, stop_ids=others | {stop})
    assert tokens == answer[:5]
    assert sequence.length == PROMPT_TOKENS + 4
    assert rig.kernel.ended()


def test_a_stop_string_ends_the_launch(rig: Rig, engine: Engine, answer: list[int]) -> None:
    word = engine.tokenizer.decode([answer[3]])
    done = ask(engine, rig.prompt, max_tokens=60, stop=(word,)).result()
    assert done.finish_reason == "stop"
    assert done.usage.completion_tokens <= 4
    assert rig.kernel.ended()


SAMPLED = Sampling(
    temperature=1.0,
    top_k=40,
    top_p=0.95,
    seed=5,
    logprobs=2,
    repetition_penalty=1.1,
    frequency_penalty=0.2,
    logit_bias={7: 1.0},
)


def test_a_sampled_answer_is_one_launch_and_the_reference_s(rig: Rig) -> None:
    """The log probabilities are those of the model; the last token is the one drawn from the kernel's own logits."""
    before = rig.kernel.launches
    sequence = rig.backend.open(rig.prompt, PROMPT_TOKENS + 4)
    assert isinstance(sequence, PagedSequence)
    rig.backend.prefill(sequence, CancelToken(), lambda done, total: None)
    tokens = list(rig.backend.decode(sequence, SAMPLED, 4, frozenset(), CancelToken()))
    rig.backend.release(sequence)
    assert rig.kernel.launches - before == 1
    ids = [token.token_id for token in tokens]
    wanted = rig.reference.logits(rig.prompt, ids).log_softmax(dim=1)
    for token, row in zip(tokens, wanted, strict=True):
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=0.1)
        assert len(token.top) == 2
    counts = TokenCounts.start(rig.prompt + ids[:-1], PROMPT_TOKENS, rig.config.vocab_size)
    logits, limit = rig.megakernel.logits[0], int(rig.megakernel.plan.header["vocab_limit"])
    assert choose(logits, SAMPLED, PROMPT_TOKENS + 3, counts, vocab_limit=limit).token_id == ids[-1]


def test_a_sampled_answer_goes_on_where_its_reader_stopped(rig: Rig) -> None:
    """What the kernel made beyond that does not count: neither tokens, nor positions, nor penalties."""
    whole = rig.decode(6, sampling=SAMPLED)[0]
    short = MegakernelBackend(rig.megakernel, memory=MemoryReport(0, 0, 0), launch_tokens=4, patience=PATIENCE)
    assert rig.decode(6, sampling=SAMPLED, backend=short)[0] == whole
    sequence = rig.backend.open(rig.prompt, PROMPT_TOKENS + 6)
    assert isinstance(sequence, PagedSequence)
    rig.backend.prefill(sequence, CancelToken(), lambda done, total: None)
    got: list[int] = []
    while len(got) < 6:
        tokens = rig.backend.decode(sequence, SAMPLED, 6 - len(got), frozenset(), CancelToken())
        got += [token.token_id for _, token in zip(range(3), tokens, strict=False)]
        tokens.close()
        assert sequence.tokens == rig.prompt + got and sequence.length == len(sequence.tokens) - 1
    rig.backend.release(sequence)
    assert got == whole


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_a_mask_is_an_input_of_the_kernel_and_must_leave_something(rig: Rig, sampling: Sampling) -> None:
    mask = torch.zeros(rig.config.vocab_size, dtype=torch.bool)
    for allowed in ([31], []):
        mask[:] = False
        mask[allowed] = True
        sequence = rig.backend.open(rig.prompt, PROMPT_TOKENS + 1)
        rig.backend.prefill(sequence, CancelToken(), lambda done, total: None)
        tokens = rig.backend.decode(sequence, sampling, 1, frozenset(), CancelToken(), mask)
        if allowed:
            assert [token.token_id for token in tokens] == allowed
        else:
            with pytest.raises(ConfigError, match=f"no token is left at position {PROMPT_TOKENS}: the mask"):
                next(tokens)
        rig.backend.release(sequence)


def test_what_needs_logits_but_changes_none_gives_the_same_answer(rig: Rig, answer: list[int]) -> None:
    assert rig.decode(4, sampling=Sampling(logprobs=0))[0] == answer[:4]


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_an_answer_ends_when_its_reader_does(rig: Rig, answer: list[int], how: str) -> None:
    cancel = CancelToken()
    sequence = rig.backend.open(rig.prompt, PROMPT_TOKENS + 100)
    assert isinstance(sequence, PagedSequence)
    rig.backend.prefill(sequence, CancelToken(), lambda done, total: None)
    tokens = rig.backend.decode(sequence, Sampling(), 100, frozenset(), cancel)
    got = [next(tokens).token_id for _ in range(2)]
    if how == "cancel":
        cancel.set()
        assert next(tokens, None) is None
    else:
        tokens.close()
    assert rig.kernel.ended()
    assert got == answer[:2]
    assert sequence.tokens == rig.prompt + got and sequence.length == PROMPT_TOKENS + 1
    made = sum(rig.megakernel.read(index) is not None for index in range(100))
    assert 2 <= made < 100
    rig.backend.release(sequence)
    assert rig.decode(8)[0] == answer


def test_cancelling_in_the_engine_keeps_what_there_is(rig: Rig, engine: Engine, answer: list[int]) -> None:
    stream = ask(engine, rig.prompt, max_tokens=100)
    next(stream)
    stream.cancel()
    done = stream.result()
    assert done.finish_reason == "cancelled" and 1 <= len(done.token_ids) < 100
    assert list(done.token_ids[:8]) == answer[: len(done.token_ids)]
    assert list(ask(engine, rig.prompt, max_tokens=3).result().token_ids) == answer[:3]


def test_non_finite_logits_name_the_position(rig: Rig, engine: Engine, answer: list[int]) -> None:
    norm = rig.backend.model.weights.final_norm
    value = float(norm[0])
    norm[0] = float("inf")
    try:
        with pytest.raises(NumericError, match=f"position {PROMPT_TOKENS} are NaN or infinite"):
            ask(engine, rig.prompt, max_tokens=5).result()
        with pytest.raises(NumericError, match=f"position {PROMPT_TOKENS} are NaN or infinite"):
            ask(engine, rig.prompt, max_tokens=5, temperature=1.0).result()
    finally:
        norm[0] = value
    assert list(ask(engine, rig.prompt, max_tokens=3).result().token_ids) == answer[:3]


@pytest.mark.complaint(
    "K5", file="engine/running_launch.py", old="self._megakernel.watch.stop()", new="self._megakernel.cancel()"
)
def test_a_stuck_kernel_is_stopped_and_the_next_request_works(
    rig: Rig, engine: Engine, answer: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """A plan with a dependency that is never met: down waits for the values of a phase that gives others."""
    tasks = rig.megakernel.plan.tasks
    cut = tasks.copy()
    cut["in_phase"][:, 6] += 100
    where = rig.megakernel._tasks
    whole = where.clone()
    where.copy_(torch.from_numpy(cut.view("uint8").reshape(-1)))
    rig.backend.patience = Patience(token_s=0.5, stop_s=20.0, exit=lambda code: None)
    own = rig.megakernel.watch
    rig.megakernel.watch = replace(own, max_turns=2**32 - 1)  # the kernel itself would wait for ever
    try:
        with pytest.raises(DeviceError, match="was stopped before its end") as caught:
            ask(engine, rig.prompt, max_tokens=5).result()
    finally:
        rig.backend.patience, rig.megakernel.watch = PATIENCE, own
        where.copy_(whole)
    assert "waited for value" in str(caught.value) and "was told to stop" in str(caught.value)
    assert not caught.value.context_lost
    assert "token 0 did not come within 0.5 s" in caplog.text
    assert list(ask(engine, rig.prompt, max_tokens=3).result().token_ids) == answer[:3]


class Dead:
    """A kernel that makes nothing, and ends or does not."""

    def __init__(self, rig: Rig, ends: bool) -> None:
        self.spec, self.ends = rig.kernel.spec, ends

    def launch(self, *args: Any, **options: Any) -> None:
        pass

    def ended(self) -> bool:
        return self.ends


@pytest.fixture
def dead(rig: Rig) -> Iterator[Any]:
    """Put a dead kernel in the place of the real one."""
    before = rig.megakernel.kernel

    def bury(ends: bool, patience: Patience) -> None:
        rig.megakernel.kernel = Dead(rig, ends)  # type: ignore[assignment]
        rig.backend.patience = patience

    yield bury
    rig.megakernel.kernel, rig.backend.patience = before, PATIENCE


def test_a_kernel_that_cannot_be_stopped_ends_the_process(
    rig: Rig, dead: Any, caplog: pytest.LogCaptureFixture
) -> None:
    codes: list[int] = []
    dead(False, Patience(token_s=0.2, stop_s=0.2, exit=codes.append))
    with caplog.at_level(logging.CRITICAL), pytest.raises(DeviceError) as caught:
        rig.decode(3)
    assert codes == [STUCK_EXIT_CODE] == [3]
    assert caught.value.context_lost
    assert "exit code 3" in caplog.text


def test_a_launch_that_ends_without_a_token_is_an_error_and_no_loop(rig: Rig, dead: Any) -> None:
    dead(True, PATIENCE)
    began = time.monotonic()
    with pytest.raises(DeviceError, match="has ended without token 0"):
        rig.decode(3)
    assert time.monotonic() - began < 5


def test_waiting_for_tokens_leaves_the_processor_to_others(rig: Rig) -> None:
    wall, own = time.perf_counter(), time.thread_time()
    rig.decode(4)
    assert time.thread_time() - own < 0.5 * (time.perf_counter() - wall)
