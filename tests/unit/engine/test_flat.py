"""Many requests of random lengths, with cancels and errors, leave pages and memory as they were."""

from __future__ import annotations

import gc
import random
import resource
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from onekernel import LLM, SamplingParams
from onekernel.engine.stream import AnswerStream
from onekernel.errors import ContextLengthError
from tests.tiny_llama import write_tiny
from tests.unit.engine.test_sharing import GREEDY, ids, load

CONTEXT = 512


class Failing:
    """A constraint that fails at its third token."""

    def __init__(self) -> None:
        self.left = 3

    def mask(self) -> torch.Tensor | None:
        return None

    def accept(self, token_id: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise ValueError("not in the grammar")

    done = False


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_tiny(tmp_path_factory.mktemp("model"), num_hidden_layers=1)
    with load(str(folder), max_context=CONTEXT, slice_tokens=4) as llm:
        yield llm


def use(llm: LLM, requests: int, seed: int) -> None:
    """Up to three at once: some are read to the end, some left early, some fail, some never fit."""
    draw = random.Random(seed)
    open_streams: list[AnswerStream] = []
    for number in range(requests):
        prompt = ids(draw.randint(1, 300), draw.randrange(5))
        params = SamplingParams(max_tokens=draw.randint(1, 12), frequency_penalty=draw.choice([0.0, 0.5]), **GREEDY)
        what = draw.random()
        if what < 0.1:
            with pytest.raises(ContextLengthError):
                llm.stream(ids(CONTEXT + 1), params)
        elif what < 0.2:
            stream = AnswerStream(
                lambda deliver, prompt=prompt, params=params: llm.loaded.engine.submit(  # type: ignore[misc]
                    tuple(prompt), params, deliver, constraint=Failing()
                )
            )
            if (params.max_tokens or 0) >= 3:
                with pytest.raises(ValueError, match="grammar"):
                    stream.result()
        else:
            open_streams.append(llm.stream(prompt, params))
            if what < 0.4:
                open_streams[-1].cancel()
        while len(open_streams) > number % 3:
            stream = open_streams.pop(0)
            stream.close() if what < 0.6 else stream.result()
    for stream in open_streams:
        stream.result()


def check_pages(llm: LLM) -> None:
    status = llm.loaded.engine.status()
    assert (status.running, status.waiting, status.kv_pages_used) == (0, 0, 0)
    backend: Any = llm.loaded.engine.backend
    assert backend.free_pages == status.kv_pages_total


def test_pages_are_all_given_back(llm: LLM) -> None:
    use(llm, 80, seed=1)
    check_pages(llm)
    assert llm.loaded.engine.status().kv_pages_cached > 0


@pytest.mark.slow
def test_a_thousand_requests_leave_the_host_s_memory_flat(llm: LLM) -> None:
    use(llm, 200, seed=2)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    use(llm, 1000, seed=3)
    check_pages(llm)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 20_000, f"{grown} kB more after 1,000 requests"


@pytest.mark.complaint("K4", file="engine/paged_backend.py", old="del self.model, self.cache, self._rope", new="pass")
def test_closing_frees_the_cache_and_the_weights_three_times(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    for _ in range(3):
        model = load(str(folder), max_context=CONTEXT)
        backend: Any = model.loaded.engine.backend
        held = [weakref.ref(tensor) for tensor in (backend.cache.pages, backend.model.weights.embedding)]
        model.generate(ids(70), SamplingParams(max_tokens=2, **GREEDY))
        model.close()
        assert [reference() for reference in held] == [None, None]  # although model and backend are still referenced


@pytest.mark.slow
def test_a_chat_of_a_thousand_turns_with_a_cut_history_keeps_its_time_per_turn(llm: LLM) -> None:
    """Processor time, so that others on the machine do not count; a history that grew would take many times as much."""
    turns, history, seconds = 1000, list[int](), list[float]()
    for turn in range(turns):
        history = [*history, *ids(6, turn)][-256:]
        began = time.process_time()
        done = llm.generate(history, SamplingParams(max_tokens=2, **GREEDY))
        seconds.append(time.process_time() - began)
        history += done.token_ids
    check_pages(llm)
    tenth = turns // 10
    assert median(seconds[-tenth:]) < 2 * median(seconds[tenth : 2 * tenth])
