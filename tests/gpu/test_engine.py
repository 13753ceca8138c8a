"""The engine on a real GPU: turns, reused pages, stop strings, a host's rules, and memory and times that stay flat."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest
import torch

from onekernel import LLM, SamplingParams
from onekernel.config import PAGE_TOKENS
from onekernel.engine.megakernel_backend import MegakernelBackend
from tests.megakernels import Reference
from tests.tiny_llama import write_tiny
from tests.unit.engine.test_flat import check_pages, use
from tests.unit.engine.test_megakernel_sharing import EveryThird
from tests.unit.engine.test_sharing import GREEDY, PENALISED, SAMPLED, ask, check_chat, check_slices, ids

pytestmark = pytest.mark.timeout(90)

GPU = "cuda:0"
CONTEXT = 2048


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    rest = {"head_dim": 64, "vocab_size": 4096, "max_position_embeddings": CONTEXT}
    return str(write_tiny(tmp_path_factory.mktemp("model"), **shape, **rest))


def load(path: str, **options: Any) -> LLM:
    return LLM(path, load_format="dummy", device=GPU, backend="megakernel", **options)


@pytest.fixture(scope="module")
def cold(path: str) -> Iterator[LLM]:
    """The model alone; it keeps nothing."""
    with load(path, prefix_cache=False) as llm:
        yield llm


def backend_of(llm: LLM) -> MegakernelBackend:
    backend = llm.loaded.engine.backend
    assert isinstance(backend, MegakernelBackend)
    return backend


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_in_slices_the_tokens_are_those_of_who_is_alone(path: str, cold: LLM, params: dict[str, Any]) -> None:
    with load(path, slice_tokens=4) as llm:
        check_slices(llm, cold, 30, params)
        check_pages(llm)


def test_reused_pages_of_a_prompt_give_the_bits_of_a_cold_run(path: str, cold: LLM) -> None:
    prompt = ids(1000)
    wanted = ask(cold, prompt, 40, logprobs=3, **GREEDY)
    with load(path) as llm:
        ask(llm, [*prompt[:650], *ids(90, 1)], 1, **GREEDY)
        warm = ask(llm, prompt, 40, logprobs=3, **GREEDY)
    assert warm.usage.cached_tokens == 640 and wanted.usage.cached_tokens == 0
    assert warm.token_ids == wanted.token_ids and warm.logprobs == wanted.logprobs


def test_a_chat_prefills_only_what_is_new_and_stays_within_the_noise(path: str) -> None:
    with load(path) as llm:
        check_chat(llm, Reference(backend_of(llm).model, CONTEXT), 4, 60)


def test_nothing_past_a_stop_string_is_shown_counted_or_kept(path: str, cold: LLM) -> None:
    """Then the same text goes on, from pages of which the kernel had filled more."""
    prompt = ids(60, 8)
    free = ask(cold, prompt, 120, **SAMPLED).token_ids
    stop = cold.tokenizer.decode(list(free[68:70]))
    end = next(n for n in range(1, 71) if stop in cold.tokenizer.decode(list(free[:n])))
    with load(path) as llm:
        done = ask(llm, prompt, 1500, stop=(stop,), **SAMPLED)
        assert done.finish_reason == "stop" and stop not in done.text
        assert done.token_ids == free[:end] and done.usage.completion_tokens == end
        assert llm.loaded.engine.status().kv_pages_cached == (60 + end - 1) // PAGE_TOKENS
        after = [*prompt, *done.token_ids, *ids(20, 9)]
        again = ask(llm, after, 40, **GREEDY)
        assert again.usage.cached_tokens == (60 + end - 1) // PAGE_TOKENS * PAGE_TOKENS
        Reference(backend_of(llm).model, CONTEXT).check_greedy(after, list(again.token_ids))


def test_a_host_s_rule_is_asked_before_each_token(cold: LLM) -> None:
    rule = EveryThird(cold.config.vocab_size, 20)
    params = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
    done = cold.stream(ids(40), params, constraint=rule).result()
    assert done.finish_reason == "stop" and list(done.token_ids) == rule.taken
    assert [token % 3 for token in rule.taken] == [step % 3 for step in range(20)]


def test_a_thousand_requests_leave_memory_flat(path: str) -> None:
    """Of random lengths, some cancelled, some failing, some that do not fit."""

    def held() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]

    with load(path, max_context=512, slice_tokens=4) as llm:
        use(llm, 200, seed=2)
        allocated, free = held()
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        use(llm, 1000, seed=3)
        check_pages(llm)
        now_allocated, now_free = held()
        assert now_allocated <= allocated + (1 << 20) and now_free >= free - (64 << 20)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host < 50_000


def test_a_chat_of_a_thousand_turns_with_a_cut_history_keeps_its_time_per_token(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Medians of the last and of the first hundred turns; each prefills its 512 tokens anew, since all have moved."""
    history, us = list[int](), list[float]()
    with load(path) as llm:
        for turn in range(1000):
            history = [*history, *ids(16, turn)][-512:]
            done = ask(llm, history, 16, **GREEDY)
            us.append(done.timings.decode_ms * 1e3 / 15)
            history += done.token_ids
        check_pages(llm)
    first, last = median(us[16:116]), median(us[-100:])  # the first 16 have shorter histories
    with capsys.disabled():
        print(f"\n  {first:.1f} us per token in the first 100 turns, {last:.1f} in the last", end="")
    assert last <= 1.15 * first
