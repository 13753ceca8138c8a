"""Turns and reused pages on the megakernel, on the shim: a launch that is cut short or goes on changes no token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from onekernel import LLM, SamplingParams
from onekernel.config import PAGE_TOKENS, EngineConfig
from onekernel.engine.backend import MemoryReport
from onekernel.engine.engine import Engine
from onekernel.engine.megakernel_backend import MegakernelBackend
from onekernel.engine.request import Completion
from onekernel.text.tokenizer import Tokenizer
from tests.megakernels import NOISE, prompt_of
from tests.unit.engine.test_megakernel_backend import PATIENCE, KeepOpen, Rig, ask

pytestmark = pytest.mark.xdist_group("transformers")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def start(rig: Rig) -> Iterator[Callable[[int], Engine]]:
    """Engines with slices of a given length on a backend that keeps pages."""
    engines: list[Engine] = []

    def make(slice_tokens: int) -> Engine:
        backend = MegakernelBackend(rig.megakernel, memory=MemoryReport(0, 0, 0), patience=PATIENCE, prefix_cache=True)
        options = EngineConfig(slice_tokens=slice_tokens)
        engines.append(Engine(KeepOpen(backend), Tokenizer.placeholder(rig.config.vocab_size), {}, options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def check(rig: Rig, prompt: list[int], done: Completion, tokens: int) -> None:
    assert len(done.token_ids) == tokens
    rig.reference.check_greedy(prompt, list(done.token_ids))


def test_two_answers_in_slices_are_two_answers_alone(rig: Rig, start: Callable[[int], Engine]) -> None:
    alone, shared = start(64), start(2)
    prompts = [rig.prompt[:40], rig.prompt[5:35]]
    wanted = [ask(alone, prompt, max_tokens=6).result().token_ids for prompt in prompts]
    before = rig.kernel.launches
    streams = [ask(shared, prompt, max_tokens=6) for prompt in prompts]
    answers = [stream.result() for stream in streams]
    assert [answer.token_ids for answer in answers] == wanted
    assert rig.kernel.launches - before >= 4
    check(rig, prompts[0], answers[0], 6)


@pytest.mark.slow
def test_a_launch_is_cut_when_somebody_comes(rig: Rig, start: Callable[[int], Engine]) -> None:
    engine = start(2)
    long = ask(engine, rig.prompt[:30], max_tokens=24)
    for _ in range(3):
        next(long)
    short = ask(engine, rig.prompt[:20], max_tokens=2).result()
    check(rig, rig.prompt[:20], short, 2)
    seen = sum(len(delta.token_ids) for delta in long)
    done = long.completion
    assert done is not None and seen == 21
    check(rig, rig.prompt[:30], done, 24)
    assert engine.status().kv_pages_used == 0


@pytest.mark.slow
def test_the_next_turn_of_a_chat_reads_the_pages_of_the_last_one(rig: Rig, start: Callable[[int], Engine]) -> None:
    """One page is of the prompt's prefill, the next was filled by the kernel, word by word."""
    engine = start(64)
    prompt = prompt_of(rig.config, 2 * PAGE_TOKENS - 12)
    first = ask(engine, prompt, max_tokens=14).result()
    check(rig, prompt, first, 14)
    history = [*prompt, *first.token_ids, *rig.prompt[:6]]
    second = ask(engine, history, max_tokens=6).result()
    assert second.usage.cached_tokens == 2 * PAGE_TOKENS
    assert second.timings.prefill_tokens == len(history) - 1 - 2 * PAGE_TOKENS
    check(rig, history, second, 6)


def test_what_the_kernel_made_past_a_stop_string_is_not_kept(rig: Rig, start: Callable[[int], Engine]) -> None:
    engine = start(64)
    free = ask(engine, rig.prompt, max_tokens=8).result()
    word = engine.tokenizer.decode([free.token_ids[3]])
    end = 1 + [engine.tokenizer.decode([token]) for token in free.token_ids].index(word)
    done = ask(engine, rig.prompt, max_tokens=110, stop=(word,)).result()
    assert done.finish_reason == "stop" and done.token_ids == free.token_ids[:end]
    assert done.usage.completion_tokens == end
    assert engine.status().kv_pages_cached == 1  # of the prompt; the kernel was on its way into the third


class EveryThird:
    """A host's rule: the token at step n leaves the remainder n when divided by three; complete after `steps`."""

    def __init__(self, vocab_size: int, steps: int) -> None:
        self.steps, self.taken = steps, list[int]()
        self._remainders = torch.arange(vocab_size) % 3

    def mask(self) -> torch.Tensor:
        return self._remainders == len(self.taken) % 3

    def accept(self, token_id: int) -> None:
        self.taken.append(token_id)

    @property
    def done(self) -> bool:
        return len(self.taken) == self.steps


@pytest.fixture
def llm(rig: Rig, start: Callable[[int], Engine], monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The public interface on the kernel."""
    loaded = SimpleNamespace(engine=start(2), config=rig.config)
    monkeypatch.setattr("onekernel.llm.load_engine", lambda *args, **options: loaded)
    return LLM("the kernel")


def test_a_host_s_rule_is_asked_before_each_token_and_costs_a_launch_for_each(rig: Rig, llm: LLM) -> None:
    """Through the whole kernel, beside an answer without a rule, which takes turns and stays as it is alone."""
    prompt, params = rig.prompt[:40], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    free = llm.generate(prompt, params)
    rule, before = EveryThird(rig.config.vocab_size, 4), rig.kernel.launches
    ruled, other = llm.stream(prompt, params, constraint=rule), llm.stream(prompt, params)
    done = ruled.result()
    assert other.result().token_ids == free.token_ids
    assert done.finish_reason == "stop" and list(done.token_ids) == rule.taken and len(rule.taken) == 4
    assert rig.kernel.launches - before >= 4 + 2
    assert [token % 3 for token in rule.taken] == [0, 1, 2, 0] != [token % 3 for token in free.token_ids[:4]]
    bf16, exact = rig.reference.logits(prompt, rule.taken), rig.reference.exact(prompt, rule.taken)
    for step, token in enumerate(rule.taken):
        allowed = exact[step, step % 3 :: 3]
        noise = (bf16[step] - exact[step]).square().mean().sqrt()
        assert allowed.max() - exact[step, token] <= NOISE * noise


def test_the_benchmark_times_a_stop_from_its_match_to_the_kernel_s_end(
    rig: Rig, start: Callable[[int], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))  # whose scripts import each other
    from benchmarks.engine import stopping

    before = rig.kernel.launches
    row = stopping(start(64), rig.prompt[:40], 16, 2, "cpu")
    assert rig.kernel.launches - before == 3
    assert row["match_to_word_ms"]["repeats"] == 2
    assert row["match_to_word_ms"]["p10"] > 0 and row["word_to_end_ms"]["p10"] > 0
    assert 2 <= row["answer_tokens"] <= 10 and 0 <= row["tokens_after"] < 14
