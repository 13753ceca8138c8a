"""Clients that leave, requests that take too long, and engines that fail."""

from __future__ import annotations

import json
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from onekernel.config import PREFILL_CHUNK_TOKENS
from onekernel.errors import DeviceError, NumericError
from onekernel.server.app import create_app
from onekernel.server.settings import ServerSettings
from tests.unit.server.conftest import Start
from tests.unit.server.serving import serving, tiny_llm, until

HI: list[Any] = [{"role": "user", "content": "Hi"}]


def post(port: int, body: dict[str, Any]) -> socket.socket:
    """Send a chat request on a socket of its own."""
    raw = json.dumps({"messages": HI} | body).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        + f"content-length: {len(raw)}\r\n\r\n".encode()
        + raw
    )
    return connection


def leave(connection: socket.socket) -> None:
    """Close as a killed client does: with a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def read_until(connection: socket.socket, text: bytes) -> bytes:
    data = b""
    while text not in data:
        piece = connection.recv(65536)
        assert piece, data
        data += piece
    return data


@pytest.mark.complaint(
    "K1",
    file="server/event_stream.py",
    old="return await task if task.done() else None",
    new="return await task",
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_during_decode_frees_the_engine(scripted: Start, stream: bool) -> None:
    server = scripted("ab", endless=True, token_s=0.005)
    connection = post(server.port, {"stream": stream})
    until(lambda: server.backend.yielded > 3)
    connection.close()
    until(lambda: server.idle)
    made = server.backend.yielded
    assert made < 8000  # the context had room for that many
    assert server.chat(max_tokens=2).json()["usage"]["completion_tokens"] == 2
    assert server.backend.yielded <= made + 2


@pytest.mark.complaint("K1", file="server/run.py", old="            token.set()", new="            pass")
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_during_prefill_frees_the_engine(scripted: Start, stream: bool) -> None:
    gate = threading.Event()
    server = scripted(prefill_gate=gate, max_context=8192)
    words = [{"role": "user", "content": "word " * 3 * PREFILL_CHUNK_TOKENS}]
    connection = post(server.port, {"stream": stream, "messages": words})
    until(lambda: server.backend.open_sequences == 1)
    connection.close()
    until(lambda: not server.service.runs)
    gate.set()
    until(lambda: server.idle)
    assert server.backend.chunks == 1
    assert server.backend.yielded == 0


def test_a_client_that_leaves_while_it_waits_is_never_run(scripted: Start) -> None:
    gate = threading.Event()
    server = scripted(prefill_gate=gate)
    first = post(server.port, {"stream": True})
    until(lambda: server.backend.open_sequences == 1)
    second = post(server.port, {"stream": False})
    until(lambda: len(server.service.runs) == 2)
    second.close()
    until(lambda: len(server.service.runs) == 1)
    gate.set()
    read_until(first, b"[DONE]")
    first.close()
    until(lambda: server.idle)
    assert len(server.backend.samplings) == 1


@pytest.mark.complaint(
    "K2", file="server/event_stream.py", old="            one.cancel()", new="            watch.cancel()"
)
def test_a_reset_connection_harms_nobody_else(scripted: Start) -> None:
    server = scripted("ab", endless=True, token_s=0.001)
    for _ in range(5):
        connection = post(server.port, {"stream": True})
        read_until(connection, b"data:")
        leave(connection)
    until(lambda: server.idle)
    assert server.chat(max_tokens=3).json()["choices"][0]["message"]["content"] == "aba"
    assert server.http.get("/health").json() == {"status": "ok"}


@pytest.mark.complaint("K3", file="server/answering.py", old="[] if batch else [KEEP_ALIVE]", new="[]")
def test_a_stream_that_waits_sends_comments(scripted: Start) -> None:
    gate = threading.Event()
    server = scripted("Hello", prefill_gate=gate, settings=ServerSettings(keep_alive_s=0.05))
    connection = post(server.port, {"stream": True})
    head = read_until(connection, b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")  # at once, though there is no token yet
    comments = head + read_until(connection, b": waiting\n\n") + read_until(connection, b": waiting\n\n")
    assert b"data:" not in comments
    gate.set()
    assert b'"role":"assistant"' in read_until(connection, b"[DONE]")
    connection.close()


def test_requests_end_at_the_time_out(scripted: Start) -> None:
    server = scripted("ab", endless=True, token_s=0.01, settings=ServerSettings(request_timeout_s=0.3))
    told = server.chat()
    assert (told.status_code, told.json()["error"]["code"]) == (504, "timeout")
    streamed = server.chat(stream=True).text
    assert '"content":"a"' in streamed
    assert '"code":"timeout"' in streamed and streamed.endswith("data: [DONE]\n\n")
    until(lambda: server.idle)


def test_a_request_that_fails_fails_alone(scripted: Start) -> None:
    server = scripted("abc", error=NumericError("the logits at position 7 are not finite"))
    told = server.chat()
    assert (told.status_code, told.json()["error"]["code"]) == (500, "NumericError")
    streamed = server.chat(stream=True).text
    assert "not finite" in streamed and streamed.endswith("data: [DONE]\n\n")
    assert server.chat(max_tokens=2).status_code == 200
    assert server.http.get("/health").status_code == 200


@pytest.mark.complaint(
    "E1", file="server/service.py", old='return "ready" if self.failure is None else "failed"', new='return "ready"'
)
def test_a_lost_device_is_told_to_everybody(scripted: Start) -> None:
    server = scripted("abc", error=DeviceError("an illegal address, see /tmp/secret/trace", context_lost=True))
    told = server.chat()
    assert told.status_code == 500 and "illegal address" in told.text
    health = server.http.get("/health")
    assert health.status_code == 503
    assert health.json()["status"] == "failed" and "illegal address" in health.json()["reason"]
    assert "secret" not in health.text + told.text
    refused = server.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")
    assert "onekernel_failed 1.0" in server.http.get("/metrics").text


def test_a_model_can_be_served_closed_and_served_again(tmp_path: Path) -> None:
    """Three times in one process, and as many threads as before."""
    engines = []
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        with tiny_llm(folder, max_context=256) as llm, serving(create_app(llm)) as address:
            body = {"messages": HI, "max_tokens": 200, "stream": True}
            with httpx.stream("POST", f"{address}/v1/chat/completions", json=body) as answer:
                next(answer.iter_lines())  # and leave
            told = httpx.post(f"{address}/v1/chat/completions", json={"messages": HI, "max_tokens": 2})
            assert told.json()["usage"]["completion_tokens"] <= 2
        engines.append(sum(thread.name == "onekernel-engine" for thread in threading.enumerate()))
    assert len(set(engines)) == 1
