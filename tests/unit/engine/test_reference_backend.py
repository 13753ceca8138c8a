"""The reference backend on a small random model: lengths, memory over many requests, independence of requests."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onekernel import LLM, SamplingParams
from onekernel.engine.reference_backend import ReferenceBackend
from onekernel.text.vocab import placeholder
from tests import oracle

pytestmark = pytest.mark.xdist_group("transformers")
LIMIT = 1030


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any]]:
    """One small float32 model, ours and transformers'."""
    folder: Path = tmp_path_factory.mktemp("model")
    theirs = oracle.make("llama", folder, num_hidden_layers=2, max_position_embeddings=LIMIT)
    placeholder(oracle.SHAPE["vocab_size"]).backend.save(str(folder / "tokenizer.json"))
    with LLM(str(folder), device="cpu", dtype="float32", max_context=LIMIT) as llm:
        yield llm, theirs


def ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, oracle.SHAPE["vocab_size"], (count,), generator=generator).tolist()


@pytest.mark.complaint(
    "I5",
    file="phases/attention/cache.py",
    old="used = page_table[: -(-length // PAGE_TOKENS)]",
    new="used = page_table[: max(1, length // PAGE_TOKENS)]",
)
def test_lengths_around_every_power_of_two_up_to_the_context(both: tuple[LLM, Any]) -> None:
    llm, theirs = both
    text = ids(LIMIT - 1)
    want = oracle.logits(theirs, text)
    lengths = sorted({n + d for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) for d in (-1, 0, 1)} - {0})
    for length in [*lengths, LIMIT - 1]:
        answer = llm.generate(text[:length], SamplingParams(max_tokens=1, temperature=0.0, logprobs=3, ignore_eos=True))
        assert answer.logprobs is not None
        expected = torch.log_softmax(want[length - 1], dim=-1)
        top = answer.logprobs[0]
        assert top.token_id == int(expected.argmax()), length
        assert top.logprob == pytest.approx(float(expected.max()), abs=1e-3), length


@pytest.mark.complaint(
    "C3",
    file="engine/pages.py",
    old="        self._free.extend(pages)",
    new="        self._free.extend(list(pages)[1:])",
)
def test_a_thousand_requests_leave_memory_as_it_was(both: tuple[LLM, Any]) -> None:
    llm, _ = both
    backend = llm.loaded.engine.backend
    assert isinstance(backend, ReferenceBackend)
    free = backend.free_pages

    def ask(count: int) -> None:
        for n in range(count):
            stream = llm.stream(ids(1 + n % 7, n), SamplingParams(max_tokens=2, temperature=0.0))
            if n % 5 == 0:
                stream.close()
            else:
                stream.result()

    ask(100)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ask(900)
    assert backend.free_pages == free
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 30_000, f"{grown} kB more after 900 requests"


def test_a_seeded_answer_does_not_depend_on_what_ran_before(both: tuple[LLM, Any]) -> None:
    llm, _ = both
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=11, ignore_eos=True)
    alone = llm.generate(ids(9), params).token_ids
    others = [SamplingParams(max_tokens=5, temperature=1.0, seed=s) for s in range(3)]
    for other in others:
        llm.generate(ids(20, 3), other)
    assert llm.generate(ids(9), params).token_ids == alone
    assert (
        llm.generate(ids(9), SamplingParams(max_tokens=12, temperature=1.0, seed=12, ignore_eos=True)).token_ids
        != alone
    )


def test_a_list_of_prompts_is_answered_in_order(both: tuple[LLM, Any]) -> None:
    llm, _ = both
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    prompts = [ids(5, seed) for seed in range(4)]
    assert [a.token_ids for a in llm.generate(prompts, params)] == [llm.generate(p, params).token_ids for p in prompts]
