"""/v1/completions, /tokenize, /detokenize."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import OpenAI
from openai.types import Completion

from onekernel import LLM, SamplingParams
from tests.unit.server.test_chat import events, strictly

TEXT = "The capital of France is"


def test_a_completion_is_that_of_the_engine(client: OpenAI, llm: LLM) -> None:
    told = client.completions.create(model="tiny", prompt=TEXT, max_tokens=8, temperature=0)
    own = llm.generate(TEXT, SamplingParams(max_tokens=8, temperature=0.0))
    assert told.choices[0].text == own.text
    assert told.usage is not None and told.usage.completion_tokens == 8


def test_a_prompt_is_a_text_ids_or_a_list_of_these(http: httpx.Client, llm: LLM) -> None:
    ids = llm.tokenizer.encode_prompt(TEXT)
    body: dict[str, Any] = {"max_tokens": 4, "temperature": 0}

    def texts(prompt: Any, **more: Any) -> list[str]:
        told = http.post("/v1/completions", json={**body, "prompt": prompt, **more}).json()
        assert [choice["index"] for choice in told["choices"]] == list(range(len(told["choices"])))
        return [choice["text"] for choice in told["choices"]]

    [one] = texts(TEXT)
    [other] = texts("Something else")
    assert texts(ids) == texts([TEXT]) == texts([ids]) == [one]
    assert texts([TEXT, "Something else"]) == [one, other]
    assert texts([TEXT, "Something else"], n=2) == [one, one, other, other]


def test_several_prompts_count_once_each(http: httpx.Client, llm: LLM) -> None:
    prompts = [TEXT, "Something else entirely"]
    told = http.post("/v1/completions", json={"prompt": prompts, "n": 2, "max_tokens": 2}).json()
    tokens = sum(len(llm.tokenizer.encode_prompt(prompt)) for prompt in prompts)
    assert told["usage"]["prompt_tokens"] == tokens
    assert told["usage"]["completion_tokens"] == 8


def test_a_stream_is_the_whole_in_pieces(http: httpx.Client) -> None:
    body = {"prompt": TEXT, "max_tokens": 6, "temperature": 0, "logprobs": 2}
    whole = http.post("/v1/completions", json=body).json()
    strictly(Completion, whole)
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(http.post("/v1/completions", json=streamed))
    for one in chunks:
        # The client's type does not know that a stream's reasons are null until the end, as OpenAI's API has it.
        for choice in one["choices"]:
            strictly(Completion, {**one, "choices": [{**choice, "finish_reason": choice["finish_reason"] or "stop"}]})
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    choices = [one["choices"][0] for one in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    for name, value in whole["choices"][0]["logprobs"].items():
        assert [item for choice in choices if choice["logprobs"] for item in choice["logprobs"][name]] == value


def test_logprobs_of_a_completion_point_into_its_text(http: httpx.Client) -> None:
    told = http.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 6, "temperature": 0, "logprobs": 1})
    logprobs = told.json()["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == 6
    for token, at, following in zip(
        logprobs["tokens"], logprobs["text_offset"], [*logprobs["text_offset"][1:], None], strict=True
    ):
        assert following is None or token.startswith("bytes:") or following - at == len(token)
    assert all(len(top) == 1 for top in logprobs["top_logprobs"])


def test_tokens_there_and_back(http: httpx.Client, llm: LLM) -> None:
    ids = llm.tokenizer.encode_prompt(TEXT)
    told = http.post("/tokenize", json={"content": TEXT}).json()
    assert (told["tokens"], told["count"], told["max_model_len"]) == (ids, len(ids), 1024)
    assert http.post("/tokenize", json={"prompt": TEXT, "model": "tiny"}).json()["tokens"] == ids
    assert http.post("/detokenize", json={"tokens": ids}).json()["content"] == TEXT
    pieces = http.post("/tokenize", json={"content": TEXT, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    assert "".join(piece["piece"] for piece in pieces) == TEXT


def test_a_text_somewhat_longer_than_the_context_is_counted(http: httpx.Client, llm: LLM) -> None:
    text = TEXT * 300
    told = http.post("/tokenize", json={"content": text}).json()
    assert told["count"] == len(llm.tokenizer.encode_prompt(text)) > told["max_model_len"]


def test_messages_are_tokenized_as_a_chat_would_be(http: httpx.Client, llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    told = http.post("/tokenize", json={"messages": messages}).json()
    assert told["tokens"] == llm.tokenizer.encode_chat(messages)


def test_special_tokens_text_can_stay_text(http: httpx.Client, llm: LLM) -> None:
    [end] = llm.tokenizer.encode("<|im_end|>", add_special_tokens=False, parse_special=True)
    assert http.post("/tokenize", json={"content": "<|im_end|>"}).json()["tokens"] == [end]
    plain = http.post("/tokenize", json={"content": "<|im_end|>", "parse_special": False}).json()["tokens"]
    assert end not in plain
    assert http.post("/detokenize", json={"tokens": plain}).json()["content"] == "<|im_end|>"


@pytest.mark.parametrize("body", [{}, {"content": "a", "messages": [{"role": "user", "content": "b"}]}])
def test_one_thing_is_tokenized(http: httpx.Client, body: dict[str, Any]) -> None:
    assert http.post("/tokenize", json=body).status_code == 400


@pytest.mark.parametrize("tokens", [[-1], [10**6], [2**70]])
def test_ids_that_are_none_are_not_detokenized(http: httpx.Client, tokens: list[int]) -> None:
    told = http.post("/detokenize", json={"tokens": tokens})
    assert told.status_code == 400
