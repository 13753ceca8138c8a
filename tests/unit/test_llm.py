"""The public interface on a small random model: one prompt or many, streams, asyncio, and what closing does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from onekernel import LLM, AsyncLLM, SamplingParams
from onekernel.errors import ConfigError, EngineClosedError
from onekernel.text.vocab import placeholder
from tests import oracle

pytestmark = pytest.mark.xdist_group("transformers")
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    oracle.make("llama", path, num_hidden_layers=1)
    placeholder(oracle.SHAPE["vocab_size"]).backend.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), device="cpu", dtype="float32") as model:
        yield model


def test_text_ids_and_a_list_of_them_give_the_same(llm: LLM) -> None:
    one = llm.generate("5 9 13", GREEDY)
    assert one.prompt_token_ids == (5, 9, 13) and len(one.token_ids) == 6
    assert llm.generate([5, 9, 13], GREEDY).token_ids == one.token_ids
    many = llm.generate(["5 9 13", [7, 8], "5 9 13"], GREEDY)
    assert [a.token_ids for a in many] == [one.token_ids, llm.generate([7, 8], GREEDY).token_ids, one.token_ids]


def test_one_bad_prompt_in_a_list_is_an_error_and_the_rest_is_let_go(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="999"):
        llm.generate([[5], [999]], GREEDY)
    assert llm.generate("5", GREEDY).finish_reason == "length"


def test_a_stream_is_the_answer_in_pieces(llm: LLM) -> None:
    stream = llm.stream("5 9 13", GREEDY)
    text = "".join(delta.text for delta in stream)
    assert stream.completion is not None
    assert stream.completion.text == text == llm.generate("5 9 13", GREEDY).text


def test_asyncio_runs_many_and_cancels(folder: Path) -> None:
    async def run() -> None:
        async with await AsyncLLM.load(str(folder), device="cpu", dtype="float32") as model:
            alone = await model.generate("5 9 13", GREEDY)
            several = await asyncio.gather(*(model.generate("5 9 13", GREEDY) for _ in range(4)))
            assert [a.token_ids for a in several] == [alone.token_ids] * 4
            pieces = [delta.text async for delta in model.stream("5 9 13", GREEDY)]
            assert "".join(pieces) == alone.text
            long = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
            async with model.stream("5", long) as stream:
                await anext(stream)
            assert stream.completion is not None and stream.completion.finish_reason == "cancelled"
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(model.generate("5", long), 0.001)
            assert (await model.generate("5 9 13", GREEDY)).token_ids == alone.token_ids

    asyncio.run(run())


def test_create_close_create_three_times(folder: Path) -> None:
    for _ in range(3):
        model = LLM(str(folder), device="cpu", dtype="float32")
        assert model.generate("5", GREEDY).finish_reason == "length"
        model.close()
        model.close()
        with pytest.raises(EngineClosedError, match="closed"):
            model.generate("5", GREEDY)
