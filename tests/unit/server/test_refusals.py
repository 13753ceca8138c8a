"""What is refused, and how: always OpenAI's JSON, a status that fits, and a message that says what to do."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import BadRequestError, OpenAI

from onekernel.errors import ConfigError, DeviceError, MemoryLimitError, NumericError, OnekernelError
from onekernel.server.api_error import ApiError, as_api_error, without_paths
from onekernel.server.body import parse
from onekernel.server.fields import ChatBody, CompletionBody
from onekernel.server.messages import template_messages
from onekernel.server.sampling import sampling_params
from onekernel.server.settings import ServerSettings
from onekernel.server.tools import read_tools
from tests.unit.server.conftest import Start

HI: list[Any] = [{"role": "user", "content": "Hi"}]
SETTINGS = ServerSettings()


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    told: dict[str, Any] = response.json()
    assert set(told) == {"error"}
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert told["error"]["message"]
    assert "Traceback" not in response.text
    return told["error"]


@pytest.mark.complaint(
    "L2",
    file="server/body.py",
    old="except (msgspec.MsgspecError, RecursionError) as error:",
    new="except RecursionError as error:",
)
@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", "warm"),
        ("temperature", -1),
        ("temperature", 1e9),
        ("temperature", True),
        ("top_k", 0.5),
        ("top_k", -2),
        ("top_p", 0),
        ("top_p", 1.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", [1]),
        ("max_tokens", 0),
        ("max_tokens", "5"),
        ("n", 0),
        ("n", 9),
        ("seed", 2**64),
        ("stop", ["a"] * 17),
        ("stop", [""]),
        ("stop", "a" * 1001),
        ("stop", {"a": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 200}),
        ("logit_bias", [1]),
        ("stream", "yes"),
        ("stream_options", 1),
        ("response_format", "json"),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("messages", []),
        ("messages", "Hi"),
        ("messages", [1]),
        ("logprobs", 5),
        ("top_logprobs", 3),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("chat_template_kwargs", []),
    ],
)
def test_a_wrong_value_is_named(http: httpx.Client, param: str, value: Any) -> None:
    error = refused(http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 1} | {param: value}))
    assert error["type"] == "invalid_request_error"
    assert param in (error["param"] or error["message"])


def test_the_client_raises_what_is_wrong(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HI, top_p=2)
    assert caught.value.param == "top_p"
    assert "from" in str(caught.value) or "above" in str(caught.value)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "wizard", "content": "Hi"},
        {"role": ["user"], "content": "Hi"},
        {"content": "Hi"},
        {"role": "user"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": ["Hi"]},
        {"role": "assistant", "tool_calls": [{}]},
        {"role": "assistant", "tool_calls": 3},
        {"role": "user", "content": "Hi", "name": 3},
    ],
)
def test_a_message_that_cannot_be_read_is_named(http: httpx.Client, message: dict[str, Any]) -> None:
    error = refused(http.post("/v1/chat/completions", json={"messages": [*HI, message]}))
    assert error["param"].startswith("messages[1]")


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [("suffix", "x", "gap"), ("echo", True, "join"), ("best_of", 3, "n"), ("functions", [{}], "tools")],
)
def test_what_is_not_built_in_is_refused_by_name(http: httpx.Client, name: str, value: Any, advice: str) -> None:
    error = refused(http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1, name: value}))
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert advice in error["message"]


def test_values_that_mean_nothing_are_taken(http: httpx.Client) -> None:
    body = {"prompt": "Hi", "max_tokens": 1, "suffix": None, "echo": False, "best_of": 1, "user": "me"}
    assert http.post("/v1/completions", json=body).status_code == 200


def test_unknown_members_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    raw = json.dumps({"messages": HI, "user": "me", "a_new_thing": 1}).encode()
    with caplog.at_level(logging.WARNING, "onekernel.server.body"):
        for _ in range(3):
            parse(raw, ChatBody)
    assert [record.getMessage() for record in caplog.records] == [
        "requests hold the unknown member 'a_new_thing', which is ignored"
    ]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses"])
def test_endpoints_that_are_not_built_in_say_so(http: httpx.Client, path: str) -> None:
    assert path in refused(http.post(path, json={"input": "Hi"}), 501)["message"]


def test_unknown_paths_and_methods_answer_in_json(http: httpx.Client) -> None:
    assert "/openapi.json" in refused(http.get("/v1/nothing"), 404)["message"]
    refused(http.get("/v1/chat/completions"), 405)
    refused(http.get("/v1/../../etc/passwd"), 404)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff\xfe", b'"a"', b"null", b"[" * 100_000, b'{"messages":NaN}'])
def test_what_is_no_json_object_is_refused(http: httpx.Client, raw: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    error = refused(http.post("/v1/chat/completions", content=raw, headers=headers))
    assert "JSON" in error["message"]


def test_other_content_types_are_refused(http: httpx.Client) -> None:
    """A page on another site may post a form or plain text without asking; it must reach nothing."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        told = http.post("/v1/chat/completions", content=b'{"messages":[]}', headers={"Content-Type": kind})
        assert "application/json" in refused(told, 415)["message"]


@pytest.mark.complaint(
    "K6", file="server/completions.py", old="if len(prompts) * choices > settings.max_choices:", new="if False:"
)
def test_more_answers_than_are_given_at_once_are_refused_by_name(http: httpx.Client) -> None:
    error = refused(http.post("/v1/completions", json={"prompt": ["Hi"] * 5, "n": 2, "max_tokens": 1}))
    assert (error["param"], error["code"]) == ("prompt", "batch_too_large")
    assert "5 prompts with n = 2" in error["message"] and "at most 8" in error["message"]
    error = refused(http.post("/v1/chat/completions", json={"messages": HI, "n": 9, "max_tokens": 1}))
    assert error["param"] == "n" and "1 to 8" in error["message"]


def test_a_prompt_that_does_not_fit_is_refused_with_the_numbers(http: httpx.Client) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": [5] * 2000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 2000}], "stream": True}),
    ):
        error = refused(http.post(path, json=body))
        assert error["code"] == "context_length_exceeded"
        assert "1024" in error["message"]


def test_a_prompt_far_too_long_is_refused_before_it_is_encoded(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*args: Any) -> list[int]:
        raise AssertionError("the text was encoded")

    monkeypatch.setattr("onekernel.text.tokenizer.encode", encode)
    text = "word " * 200_000
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/tokenize", {"content": text}),
        ("/tokenize", {"prompt": text, "add_special_tokens": False}),
        ("/tokenize", {"messages": [{"role": "user", "content": text}]}),
    ):
        error = refused(http.post(path, json=body))
        assert error["code"] == "context_length_exceeded"
        assert "the prompt has at least" in error["message"] and "1024" in error["message"]


def test_parameters_that_overflow_are_the_callers_mistake(http: httpx.Client) -> None:
    body = {"messages": HI, "max_tokens": 1, "temperature": 1, "repetition_penalty": 1e-300}
    assert "milder" in refused(http.post("/v1/chat/completions", json=body))["message"]


def test_a_full_queue_says_when_to_come_back(scripted: Start) -> None:
    from onekernel.config import EngineConfig

    server = scripted("ab", endless=True, token_s=0.01, options=EngineConfig(max_waiting=0))
    with server.http.stream("POST", "/v1/chat/completions", json={"messages": HI, "stream": True}) as running:
        next(running.iter_lines())
        statuses = []
        for _ in range(20):  # running requests take turns, so it takes some to fill the queue of one that may not wait
            told = server.chat(max_tokens=1, n=8)
            statuses.append(told.status_code)
            if told.status_code == 429:
                break
        assert refused(told, 429)["type"] == "rate_limit_error"
        assert told.headers["retry-after"] == "1"


def test_limits_of_a_request(http: httpx.Client, scripted: Start) -> None:
    small = scripted(settings=ServerSettings(max_body_bytes=2000, max_messages=3, max_tools=1))
    assert "2000" in refused(small.chat(messages=[{"role": "user", "content": "x" * 3000}]), 413)["message"]

    def chunks() -> Any:
        yield b'{"messages": "'
        for _ in range(100):
            yield b"x" * 100

    headers = {"Content-Type": "application/json"}
    refused(small.http.post("/v1/chat/completions", content=chunks(), headers=headers), 413)
    assert "at most 3" in refused(small.chat(messages=HI * 4))["message"]
    tool = {"type": "function", "function": {"name": "f"}}
    assert "at most 1" in refused(small.chat(tools=[tool, tool]))["message"]
    assert small.chat().status_code == 200


def test_a_body_that_does_not_come_is_refused(scripted: Start) -> None:
    import socket

    server = scripted(settings=ServerSettings(body_timeout_s=0.2))
    with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))) as slow:
        slow.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{"
        )
        slow.settimeout(20)
        assert slow.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("top_k is 0.5; it must be a whole number"), 400),
        (MemoryLimitError("no pages", 1, 0, 0), 503),
        (NumericError("logits are not finite"), 500),
        (DeviceError("the kernel stood still"), 500),
        (RuntimeError("something in /usr/lib/python3/secret.py"), 500),
        (OnekernelError("see /home/someone/.cache/onekernel/kernel.cu"), 500),
    ],
)
def test_errors_have_a_status_and_no_paths(error: Exception, status: int) -> None:
    told = as_api_error(error)
    assert told.status == status
    assert "/usr" not in told.message and "/home" not in told.message and "secret" not in told.message


def test_paths_are_cut_and_other_slashes_stay() -> None:
    assert without_paths("see /home/a b/x and '/tmp/q/kernel.cu': 5 tok/s, </think>") == (
        "see a b/x and 'kernel.cu': 5 tok/s, </think>"
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
MEMBERS = st.sampled_from([*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__, "suffix", "audio", "x"])


@settings(max_examples=60)
@given(st.dictionaries(MEMBERS, JSON, max_size=6), st.sampled_from([ChatBody, CompletionBody]))
def test_any_json_is_taken_or_refused_with_a_reason(data: dict[str, Any], kind: Any) -> None:
    try:
        body = parse(json.dumps(data).encode(), kind)
        sampling_params(body, {}, SETTINGS, max_tokens=body.max_tokens, logprobs=None)
        if isinstance(body, ChatBody):
            template_messages(body.messages, SETTINGS)
            read_tools(body, SETTINGS)
    except (ApiError, ConfigError) as error:
        assert as_api_error(error).status == 400
        assert str(error)
