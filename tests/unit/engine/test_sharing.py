"""Several requests and reused pages on a small model: who shares the engine gets the tokens of who is alone."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from onekernel import LLM, SamplingParams
from onekernel.config import PAGE_TOKENS, PREFILL_CHUNK_TOKENS, Sampling
from onekernel.engine.backend import DecodedToken, SequenceState
from onekernel.engine.engine import Engine
from onekernel.engine.paged_backend import PagedSequence, own_sequence
from onekernel.engine.reference_backend import ReferenceBackend
from onekernel.engine.request import CancelToken, Completion
from onekernel.engine.stream import AnswerStream
from tests.megakernels import Reference
from tests.tiny_llama import CONFIG, write_tiny

CONTEXT = CONFIG["max_position_embeddings"]
VOCAB = CONFIG["vocab_size"]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "ignore_eos": True}
PENALISED: dict[str, Any] = {**SAMPLED, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.3}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("model")))


def load(path: str, **options: Any) -> LLM:
    return LLM(path, load_format="dummy", device="cpu", dtype="bfloat16", threads=1, **options)


@pytest.fixture(scope="module")
def llm(path: str) -> Iterator[LLM]:
    """Small slices, so that answers are cut often."""
    with load(path, slice_tokens=3) as llm:
        yield llm


@pytest.fixture(scope="module")
def cold(path: str) -> Iterator[LLM]:
    """The same model; it keeps nothing."""
    with load(path, prefix_cache=False) as llm:
        yield llm


def ids(count: int, seed: int = 0) -> list[int]:
    tokens: list[int] = torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


def ask(llm: LLM, prompt: Sequence[int], tokens: int, **params: Any) -> Completion:
    return llm.generate(list(prompt), SamplingParams(max_tokens=tokens, **params))


def backend_of(llm: LLM) -> ReferenceBackend:
    backend = llm.loaded.engine.backend
    assert isinstance(backend, ReferenceBackend)
    return backend


def check_slices(llm: LLM, cold: LLM, tokens: int, params: dict[str, Any]) -> list[tuple[int, ...]]:
    """Four answers that share `llm` are those that `cold` gives one by one, which are returned."""
    prompts = [ids(5 + 7 * n, n) for n in range(4)]
    alone = [ask(cold, prompt, tokens + n, **params).token_ids for n, prompt in enumerate(prompts)]
    streams = [llm.stream(p, SamplingParams(max_tokens=tokens + n, **params)) for n, p in enumerate(prompts)]
    assert [stream.result().token_ids for stream in streams] == alone
    return alone


def check_chat(llm: LLM, reference: Reference, turns: int, tokens: int) -> list[int]:
    """Each turn prefills only what its pages do not hold; return the history, with what would be asked next.

    Pages of answers hold what decode computed: the tokens may differ from a cold run's where two are as likely.
    """
    history = ids(100)
    for turn in range(turns):
        done = ask(llm, history, tokens, **GREEDY)
        if turn:  # all but the 36 new tokens, and the last one of the answer, which was not run
            assert done.usage.cached_tokens >= (len(history) - 37) // PAGE_TOKENS * PAGE_TOKENS
        assert done.timings.prefill_tokens == len(history) - 1 - done.usage.cached_tokens
        reference.check_greedy(history, list(done.token_ids))
        history += [*done.token_ids, *ids(36, turn + 1)]
    return history


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_in_slices_the_tokens_are_those_of_who_is_alone(llm: LLM, cold: LLM, params: dict[str, Any]) -> None:
    assert len(set(check_slices(llm, cold, 20, params)[3])) > 5


def test_threads_that_call_generate_take_turns(llm: LLM, cold: LLM) -> None:
    order: list[int] = []
    answers: dict[int, tuple[int, ...]] = {}

    def work(number: int) -> None:
        stream = llm.stream(ids(9, number), SamplingParams(max_tokens=60, **GREEDY))
        for delta in stream:
            order.extend([number] * len(delta.token_ids))
        answers[number] = stream.result().token_ids

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == {number: ask(cold, ids(9, number), 60, **GREEDY).token_ids for number in range(3)}
    assert order != sorted(order, key=order.index)  # nobody was served as a whole


def test_more_prompts_in_a_list_than_may_wait_are_all_answered(path: str) -> None:
    with load(path, max_waiting=2) as llm:
        answers = llm.generate([ids(4, n) for n in range(9)], SamplingParams(max_tokens=3, **GREEDY))
    assert [answer.usage.completion_tokens for answer in answers] == [3] * 9


@pytest.mark.complaint(
    "J1",
    file="engine/prefix_cache.py",
    old="before[-1].number if before else _ROOT, tuple(tokens)",
    new="_ROOT, tuple(tokens)",
)
def test_pages_of_whole_chunks_give_the_bits_of_a_cold_run(path: str, cold: LLM) -> None:
    """The second chunk of one prompt is the first chunk of another, which its place in the text must tell apart."""
    first, second, rest = ids(PREFILL_CHUNK_TOKENS), ids(PREFILL_CHUNK_TOKENS, 1), ids(50, 2)
    prompt = [*first, *second, *rest]
    with load(path) as llm:
        ask(llm, [*second, *ids(70, 3)], 1, **GREEDY)
        ask(llm, [*first, *second, *ids(30, 4)], 1, **GREEDY)
        warm = ask(llm, prompt, 40, logprobs=3, **GREEDY)
    wanted = ask(cold, prompt, 40, logprobs=3, **GREEDY)
    assert warm.usage.cached_tokens == 2 * PREFILL_CHUNK_TOKENS
    assert warm.timings.prefill_tokens == 49
    assert wanted.usage.cached_tokens == 0 and wanted.timings.prefill_tokens == len(prompt) - 1
    assert warm.token_ids == wanted.token_ids
    assert warm.logprobs == wanted.logprobs


@pytest.mark.complaint(
    "J1",
    file="engine/paged_backend.py",
    old="        self._pages.share(own.lease, own.tokens[: own.length])",
    new="        self._pages.share(own.lease, own.tokens)",
)
def test_a_chat_prefills_only_what_is_new_and_stays_within_the_noise(path: str, cold: LLM) -> None:
    with load(path) as llm:
        history = check_chat(llm, Reference(backend_of(cold).model, CONTEXT), 6, 28)
        use = llm.loaded.engine.status()
    assert use.prefix_hit_tokens > use.prefix_query_tokens / 2 > 0
    assert use.kv_pages_used == 0 and use.kv_pages_cached == len(history[:-37]) // PAGE_TOKENS


def test_the_same_request_again_is_read_from_the_cache(path: str, cold: LLM) -> None:
    prompt = ids(300, 5)
    wanted = ask(cold, prompt, 30, **SAMPLED).token_ids
    with load(path) as llm:
        answers = [ask(llm, prompt, 30, **SAMPLED) for _ in range(2)]
    assert answers[0].token_ids == wanted
    assert [answer.usage.cached_tokens for answer in answers] == [0, 256]
    assert answers[1].usage.prompt_tokens == 300


def test_a_small_cache_evicts_and_answers_go_on(path: str, cold: LLM) -> None:
    with load(path, max_context=512, kv_tokens=512) as llm:
        for n in range(6):
            prompt = ids(400, n % 3)
            assert ask(llm, prompt, 5, **GREEDY).token_ids == ask(cold, prompt, 5, **GREEDY).token_ids
        streams = [llm.stream(ids(300, n), SamplingParams(max_tokens=5, **GREEDY)) for n in range(4)]
        assert [len(stream.result().token_ids) for stream in streams] == [5] * 4  # one at a time fits
        assert llm.loaded.engine.status().kv_pages_total == 8


def test_dynamic_scaling_reuses_nothing(tmp_path: Path) -> None:
    """Its keys depend on how long a request may become."""
    folder = write_tiny(tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with load(str(folder)) as llm:
        for _ in range(2):
            assert ask(llm, ids(300), 2, **GREEDY).usage.cached_tokens == 0


class RunningAhead(ReferenceBackend):
    """Makes eight tokens before it hands over the first one, as a kernel does whose host is slow."""

    def decode(
        self,
        sequence: SequenceState,
        sampling: Sampling,
        limit: int,
        stop_ids: frozenset[int],
        cancel: CancelToken,
        mask: torch.Tensor | None = None,
    ) -> Generator[DecodedToken, None, None]:
        own = own_sequence(sequence)
        for start in range(0, limit, 8):
            ahead = PagedSequence(list(own.tokens), own.prompt_tokens, own.lease, own.rope, own.length)
            for token in list(super().decode(ahead, sampling, min(8, limit - start), stop_ids, cancel, mask)):
                own.add(token.token_id)
                yield token


@pytest.fixture
def ahead(cold: LLM) -> Iterator[Engine]:
    model = backend_of(cold).model
    backend = RunningAhead(
        model,
        max_context=CONTEXT,
        num_pages=100,
        vocab_limit=VOCAB,
        memory=backend_of(cold).memory,
        prefix_cache=True,
    )
    engine = Engine(backend, cold.tokenizer, {})
    yield engine
    engine.close()


def test_nothing_past_a_stop_string_is_shown_counted_or_kept(ahead: Engine, cold: LLM) -> None:
    prompt = ids(60, 8)
    free = ask(cold, prompt, 80, **GREEDY)
    end = 70  # the answer's last token, in the middle of a run that goes on to 72
    stop = cold.tokenizer.decode([free.token_ids[end - 1]]).strip()
    end = 1 + [cold.tokenizer.decode([token]).strip() for token in free.token_ids].index(stop)
    params = SamplingParams(max_tokens=200, stop=(f" {stop}",), **GREEDY)
    streamed: list[int] = []
    stream = AnswerStream(lambda deliver: ahead.submit(tuple(prompt), params, deliver))
    for delta in stream:
        streamed.extend(delta.token_ids)
    done = stream.result()
    assert done.finish_reason == "stop"
    assert stop not in done.text.split()
    assert list(done.token_ids) == streamed == list(free.token_ids[:end])
    assert done.usage.completion_tokens == end
    assert ahead.status().kv_pages_cached == (60 + end - 1) // PAGE_TOKENS
    # What the kernel had made beyond it lies in the pages and is no part of what comes next.
    after = [*prompt, *done.token_ids, *ids(20, 9)]
    again = AnswerStream(lambda deliver: ahead.submit(tuple(after), SamplingParams(max_tokens=20, **GREEDY), deliver))
    answer = again.result()
    assert answer.usage.cached_tokens == (60 + end - 1) // PAGE_TOKENS * PAGE_TOKENS
    Reference(backend_of(cold).model, CONTEXT).check_greedy(after, list(answer.token_ids))


def test_penalty_counts_are_those_of_accepted_tokens(ahead: Engine, cold: LLM) -> None:
    prompt = ids(20, 6)
    wanted = ask(cold, prompt, 30, **PENALISED).token_ids
    streams = [
        AnswerStream(lambda deliver: ahead.submit(tuple(prompt), SamplingParams(max_tokens=30, **PENALISED), deliver))
        for _ in range(2)
    ]
    ahead.options = type(ahead.options)(slice_tokens=5)  # each slice drops three tokens that were made ahead
    assert [stream.result().token_ids for stream in streams] == [wanted] * 2
