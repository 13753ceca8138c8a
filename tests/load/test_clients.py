"""Many clients, clients that leave, and a server that is killed: on a process of its own."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.load.clients import PATH, Answer, Body, ask, ask_alone, ask_at_once, bodies, http_client
from tests.load.server_process import ServerProcess, server_process
from tests.unit.server.serving import until, write_chatting

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("load"), pytest.mark.timeout(300)]

CLIENTS = 64
LOAD_S = 60.0
LEAVERS = 1000
ALLOWED_BYTES = 20 * 10**6

FLAGS = ("--load-format", "dummy", "--ctx-size", "2048")


@dataclass
class Served:
    """A server that has answered 100 requests, one after another, and what it answered."""

    server: ServerProcess
    asked: list[Body]
    answers: list[Answer]
    rss_bytes: int


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chatting(tmp_path_factory.mktemp("a tiny model"))


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[Served]:
    with server_process(tiny, *FLAGS) as server:
        asked = bodies(100)
        answers = asyncio.run(_with_client(server, ask_alone, asked))
        whole = [index for index, (text, _) in enumerate(answers) if text]
        assert len(whole) > 80  # a few end with their first token
        assert {reason for _, reason in answers} == {"stop", "length"}
        assert len(set(answers)) > 70
        yield Served(server, [asked[i] for i in whole], [answers[i] for i in whole], server.rss_bytes)


async def _with_client(server: ServerProcess, send: object, asked: list[Body]) -> list[Answer]:
    async with http_client(server.url, CLIENTS) as client:
        return await send(client, asked)  # type: ignore[operator, no-any-return]


def assert_well(served: Served) -> None:
    """The server is idle, answers as before, and holds no more memory than before."""
    until(lambda: served.server.queue() == 0, 60)
    assert asyncio.run(_with_client(served.server, ask_alone, served.asked[:8])) == served.answers[:8]
    grown = served.server.rss_bytes - served.rss_bytes
    assert grown <= ALLOWED_BYTES, f"the server grew by {grown / 1e6:.1f} MB"


def test_64_clients_get_for_a_minute_what_each_would_get_alone(served: Served) -> None:
    end = time.monotonic() + LOAD_S

    async def one_client(client: httpx.AsyncClient, draw: random.Random) -> int:
        count = 0
        while time.monotonic() < end:
            index = draw.randrange(len(served.asked))
            assert await ask(client, served.asked[index]) == served.answers[index]
            count += 1
        return count

    async def load() -> list[int]:
        async with http_client(served.server.url, CLIENTS) as client:
            return await asyncio.gather(*(one_client(client, random.Random(seed)) for seed in range(CLIENTS)))

    counts = asyncio.run(load())
    assert min(counts) > 0  # nobody starves
    assert_well(served)


def test_1000_clients_leave_at_random_moments(served: Served) -> None:
    host, port = served.server.url.removeprefix("http://").split(":")
    draw = random.Random(0)
    turns = asyncio.Semaphore(48)

    async def leave() -> None:
        content = "word " * draw.choice((1, 10, 300))
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 200,
            "ignore_eos": True,
            "stream": draw.random() < 0.5,
            "n": draw.choice((1, 1, 3)),
        }
        raw = json.dumps(body).encode()
        head = f"POST {PATH} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        request = f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw
        cut = draw.randrange(len(request)) if draw.random() < 0.1 else len(request)
        async with turns:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(request[:cut])
            if draw.random() < 0.5:
                await asyncio.sleep(draw.uniform(0, 0.05))
            else:
                with_some = asyncio.ensure_future(reader.read(draw.choice((1, 100, 2000))))
                await asyncio.wait({with_some}, timeout=draw.uniform(0.01, 0.2))
                with_some.cancel()
            if draw.random() < 0.5:
                writer.transport.abort()
            else:
                writer.close()

    async def crowd() -> None:
        await asyncio.gather(*(leave() for _ in range(LEAVERS)))

    asyncio.run(crowd())
    assert_well(served)


def test_a_killed_server_starts_again_on_the_same_port(tiny: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    body = bodies(2)[1]
    long = {**body, "max_tokens": 1500, "ignore_eos": True, "stop": [], "stream": True}

    async def cut_off(server: ServerProcess) -> list[Answer | BaseException]:
        async with http_client(server.url, 8) as client:
            open_requests = [asyncio.ensure_future(ask(client, long)) for _ in range(8)]
            await asyncio.sleep(0.3)
            server.process.send_signal(signal.SIGKILL)
            return await asyncio.gather(*open_requests, return_exceptions=True)

    with server_process(tiny, *FLAGS, port=port) as server:
        first = asyncio.run(_with_client(server, ask_alone, [body]))
        ends = asyncio.run(cut_off(server))
        assert all(isinstance(end, (httpx.TransportError, AssertionError)) for end in ends)  # cut, and seen as cut
    with server_process(tiny, *FLAGS, port=port) as server:
        assert asyncio.run(_with_client(server, ask_alone, [body])) == first


def test_8_clients_at_once_on_a_real_model(smollm2_gguf: Path) -> None:
    questions = ["France", "Italy", "Spain", "Japan", "Egypt", "Peru", "Kenya", "Norway"]
    asked: list[Body] = [
        {
            "messages": [{"role": "user", "content": f"What is the capital of {country}?"}],
            "max_tokens": 8,
            "temperature": 0,
            "stream": index % 2 == 0,
        }
        for index, country in enumerate(questions)
    ]
    with server_process(smollm2_gguf, "--ctx-size", "512") as server:
        at_once = asyncio.run(_with_client(server, ask_at_once, asked))
        alone = asyncio.run(_with_client(server, ask_alone, asked[:3]))
    assert at_once[:3] == alone
    assert "Paris" in alone[0][0]
    assert len({text for text, _ in at_once}) == len(at_once)
    assert all(text for text, _ in at_once)
