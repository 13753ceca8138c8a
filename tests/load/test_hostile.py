"""What no client should send: never a 500, never a hang, always an error that says what is wrong."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from starlette.applications import Starlette

from onekernel.engine.engine import Engine
from onekernel.server.app import create_app
from onekernel.server.settings import ServerSettings
from tests.load.fuzz import VALID, fuzzed
from tests.unit.server.serving import serving, text_backend, tiny_llm, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("load"), pytest.mark.timeout(300)]

BODIES = 10_000
EXAMPLES = 40
SLOW_CLIENTS = 100
PATIENCE_S = 1.0
MAX_BODY_BYTES = 100_000

EXPECTED = {200, 400, 404, 405, 408, 413, 415, 422, 501}
"""What a body may be answered with; 429 and 503 are for a server that is busy, and this one is not."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine that says the same few words at once, with a real tokenizer and template."""
    with tiny_llm(tmp_path_factory.mktemp("tiny"), max_context=512) as llm:
        engine = Engine(text_backend(llm.tokenizer, "Hello there", max_context=512), llm.tokenizer, {})
        yield engine
        engine.close()


@pytest.fixture(scope="module")
def app(engine: Engine) -> Starlette:
    limits = ServerSettings(model_names=("tiny",), max_body_bytes=MAX_BODY_BYTES, body_timeout_s=PATIENCE_S)
    return create_app(engine, limits)


def test_10000_wrong_bodies_are_answered(app: Starlette, engine: Engine) -> None:
    draw = random.Random(0)
    found: dict[int, int] = {}

    async def send_all() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for _ in range(BODIES):
                path, raw = fuzzed(draw)
                response = await client.post(path, content=raw, headers={"Content-Type": "application/json"})
                assert response.status_code in EXPECTED, (response.status_code, response.text, path, raw[:2000])
                if response.status_code != 200:
                    assert response.json()["error"]["message"], (path, raw)
                    assert "Traceback" not in response.text
                found[response.status_code] = found.get(response.status_code, 0) + 1

    asyncio.run(send_all())
    assert found[400] > BODIES / 2
    assert found[200] > BODIES / 10  # some odd values are right, and some bodies have none
    assert engine.failure is None
    until(lambda: engine.status().running == 0)


def operations(app: Starlette) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", app)


@pytest.mark.parametrize("path", sorted(VALID))
def test_requests_made_from_the_openapi_document_never_end_in_a_500(app: Starlette, path: str) -> None:
    operation = operations(app)[path]["POST"]

    @given(case=operation.as_strategy())
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def answered(case: Any) -> None:
        response = case.call()
        assert response.status_code < 500, (response.status_code, response.text, case.body)

    answered()


def test_the_openapi_document_names_every_endpoint(app: Starlette) -> None:
    assert set(VALID) <= {operation.ok().path for operation in operations(app).get_all_operations()}


def raw_connection(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10 * PATIENCE_S)


def post_head(length: int | None) -> bytes:
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}{size}\r\n\r\n".encode()


@pytest.mark.parametrize("beginning", [b"POST /v1/chat/comp", post_head(1000) + b'{"mess', post_head(None) + b"3\r\n{"])
def test_clients_that_dawdle_are_cut_off_and_delay_nobody(app: Starlette, beginning: bytes) -> None:
    with serving(app, head_timeout_s=PATIENCE_S) as url:
        slow = [raw_connection(url) for _ in range(SLOW_CLIENTS)]
        try:
            for one in slow:
                one.sendall(beginning)
            body = {"messages": [{"role": "user", "content": "hello"}]}
            response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=20)
            assert response.json()["choices"][0]["message"]["content"] == "Hello there"
            for one in slow:
                assert one.recv(1000).startswith(b"HTTP/1.1 408")
                while one.recv(1000):
                    pass  # until it is closed
        finally:
            for one in slow:
                one.close()


@pytest.mark.parametrize("length", [MAX_BODY_BYTES + 1, 10**15, None])
def test_bodies_that_are_too_large_are_refused_before_they_are_read(app: Starlette, length: int | None) -> None:
    with serving(app) as url, raw_connection(url) as connection:
        connection.sendall(post_head(length))
        chunk = b"ffff\r\n" + b" " * 0xFFFF + b"\r\n"
        if length is None:
            for _ in range(3):
                connection.sendall(chunk)
        answer = connection.recv(4000)
        assert answer.startswith(b"HTTP/1.1 413")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].startswith("the body has more than")
        began = time.monotonic()
        with pytest.raises(OSError), connection:
            while time.monotonic() - began < 20:  # the server does not go on reading
                connection.sendall(chunk)
