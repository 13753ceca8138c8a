"""/v1/chat/completions through OpenAI's own client and its types."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from onekernel import LLM, SamplingParams
from tests.unit.server.conftest import Start

HI: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Every event but [DONE], which must be the last."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def strictly(kind: Any, value: dict[str, Any]) -> Any:
    """Validate with the client's own type, which for its part takes nearly anything."""
    return kind.model_validate(value, strict=True)


def test_an_answer_is_that_of_the_engine(client: OpenAI, llm: LLM) -> None:
    told = client.chat.completions.create(model="tiny", messages=HI, max_tokens=12, temperature=0)
    own = llm.generate(HI, SamplingParams(max_tokens=12, temperature=0.0))
    assert told.choices[0].message.content == own.text
    assert told.choices[0].message.role == "assistant"
    assert told.choices[0].finish_reason == own.finish_reason == "length"
    assert told.usage is not None
    assert (told.usage.prompt_tokens, told.usage.completion_tokens) == (len(own.prompt_token_ids), 12)
    assert told.usage.total_tokens == told.usage.prompt_tokens + 12
    assert told.object == "chat.completion"
    assert told.model == "tiny"


def test_an_answer_has_the_types_of_the_client(http: httpx.Client) -> None:
    body = {"messages": HI, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "n": 2}
    told = strictly(ChatCompletion, http.post("/v1/chat/completions", json=body).json())
    assert [choice.index for choice in told.choices] == [0, 1]
    logprobs = told.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == 3
    for entry in logprobs.content:
        assert entry.bytes is not None
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob


@pytest.mark.complaint(
    "L1",
    file="server/answering.py",
    old="pieces = [] if index in begun else self._form.begin(index)",
    new="pieces: list[Any] = []",
)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("with_usage", [False, True])
def test_a_stream_begins_with_the_role_and_ends_with_a_reason(http: httpx.Client, count: int, with_usage: bool) -> None:
    body = {"messages": HI, "max_tokens": 5, "stream": True, "n": count, "temperature": 0}
    if with_usage:
        body["stream_options"] = {"include_usage": True}
    chunks = [strictly(ChatCompletionChunk, one) for one in events(http.post("/v1/chat/completions", json=body))]
    assert len({chunk.id for chunk in chunks}) == 1
    if with_usage:
        *chunks, last = chunks
        assert last.choices == []
        assert last.usage is not None and last.usage.completion_tokens == 5 * count
    assert all(chunk.usage is None for chunk in chunks)
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    whole = http.post("/v1/chat/completions", json={**body, "stream": False}).json()
    for index in range(count):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert all(choice.delta.role is None for choice in own[1:])
        assert [choice.finish_reason for choice in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == "length"
        text = "".join(choice.delta.content or "" for choice in own)
        assert text == whole["choices"][index]["message"]["content"]


@pytest.mark.complaint(
    "L1", file="server/chat_form.py", old='"logprobs": None, "finish_reason": None}', new='"finish_reason": ""}'
)
def test_no_reason_is_null_and_not_an_empty_string(http: httpx.Client) -> None:
    body = {"messages": HI, "max_tokens": 3, "stream": True}
    told = events(http.post("/v1/chat/completions", json=body))
    assert all("usage" not in one for one in told)
    assert [one["choices"][0]["finish_reason"] for one in told[:-1]] == [None] * (len(told) - 1)


def test_the_usage_is_null_until_the_end_when_it_is_asked_for(http: httpx.Client) -> None:
    body = {"messages": HI, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    told = events(http.post("/v1/chat/completions", json=body))
    assert [one["usage"] for one in told[:-1]] == [None] * (len(told) - 1)
    assert told[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0


def test_streamed_logprobs_are_those_of_the_whole_answer(client: OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": HI, "max_tokens": 6, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**options)
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**options, stream=True):
        if chunk.choices and chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content or []
    assert whole.choices[0].logprobs is not None
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.choices[0].logprobs.content or []]


def test_a_seed_repeats_an_answer_and_its_choices_differ(client: OpenAI) -> None:
    def answers(seed: int) -> list[str | None]:
        told = client.chat.completions.create(model="tiny", messages=HI, max_tokens=8, temperature=1, seed=seed, n=2)
        return [choice.message.content for choice in told.choices]

    first = answers(7)
    assert first == answers(7)
    assert first[0] != first[1]
    assert answers(8)[0] == first[1]


def test_content_parts_and_the_developer_role_are_text_and_system(scripted: Start) -> None:
    server = scripted()
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "this?"}]
    server.chat(messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}])
    server.chat(messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is\nthis?"}])
    assert server.backend.prompts[0] == server.backend.prompts[1]


@pytest.mark.parametrize(("stop", "text"), [("lo", "Hel"), (["xyz", "l"], "He"), (None, "Hello"), ([], "Hello")])
def test_stop_strings(scripted: Start, stop: Any, text: str) -> None:
    server = scripted("Hello")
    told = server.chat(stop=stop).json()
    assert told["choices"][0]["message"]["content"] == text
    assert told["choices"][0]["finish_reason"] == "stop"
    streamed = events(server.chat(stop=stop, stream=True))
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in streamed) == text


def test_thinking_is_reasoning_content(scripted: Start) -> None:
    server = scripted("<think>\nHm, so.</think>\n\nParis", template="qwen_thinking")
    message = server.chat().json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, so.", "Paris")
    deltas = [one["choices"][0]["delta"] for one in events(server.chat(stream=True))]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, so."
    assert "".join(delta.get("content", "") for delta in deltas) == "Paris"


def test_template_options_reach_the_template_and_only_it(scripted: Start) -> None:
    server = scripted(template="qwen_thinking")
    server.chat()
    server.chat(chat_template_kwargs={"enable_thinking": False})
    assert server.backend.prompts[0] != server.backend.prompts[1]
    for name in ("messages", "tools", "parse_special_in_content", "self"):
        told = server.chat(chat_template_kwargs={name: True})
        assert told.status_code == 400
        assert name in told.json()["error"]["message"]


def test_sampling_parameters_reach_the_engine(scripted: Start) -> None:
    server = scripted()
    body = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 11,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"5": -100, "7": 1.5},
        "seed": -2,
    }
    assert server.chat(**body).status_code == 200
    sampling = server.backend.samplings[-1]
    for name, value in body.items():
        if name not in ("logit_bias", "seed"):
            assert getattr(sampling, name) == value
    assert sampling.logit_bias == {5: -100.0, 7: 1.5}
    assert sampling.seed == 2**64 - 2


def test_top_k_is_off_unless_somebody_asks_for_it(scripted: Start) -> None:
    """The command line follows transformers, whose default is 50; OpenAI's API has no top_k."""
    server = scripted()
    server.chat(temperature=1)
    assert server.backend.samplings[-1].top_k == 0
    model_says = scripted(generation_config={"top_k": 20})
    model_says.chat(temperature=1)
    assert model_says.backend.samplings[-1].top_k == 20
    model_says.chat(temperature=1, top_k=0)
    assert model_says.backend.samplings[-1].top_k == 0


def test_without_a_limit_an_answer_may_fill_the_context(scripted: Start) -> None:
    server = scripted("ab", endless=True, max_context=200)
    told = server.chat().json()
    assert told["choices"][0]["finish_reason"] == "length"
    assert told["usage"]["total_tokens"] == 200
    assert server.chat(max_tokens=-1).json()["usage"] == told["usage"]
    assert server.chat(max_tokens=9, max_completion_tokens=3).json()["usage"]["completion_tokens"] == 3


def test_timings_have_the_keys_of_llama_cpp(http: httpx.Client) -> None:
    keys = {"cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"}
    keys |= {"predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"}
    told = http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 4}).json()
    assert keys <= set(told["timings"])
    assert told["timings"]["predicted_n"] == 4
    assert told["timings"]["cache_n"] == told["usage"]["prompt_tokens_details"]["cached_tokens"]
    streamed = events(http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 4, "stream": True}))
    assert [n for n, one in enumerate(streamed) if "timings" in one] == [len(streamed) - 1]


def test_the_served_name_is_answered_and_others_are_refused(client: OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "also-tiny"]
    assert client.models.retrieve("also-tiny").id == "also-tiny"
    told = client.chat.completions.create(model="also-tiny", messages=HI, max_tokens=1)
    assert told.model == "also-tiny"
    wrong = http.post("/v1/chat/completions", json={"model": "gpt-4", "messages": HI})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
    assert "'tiny'" in wrong.json()["error"]["message"]
