"""The examples of docs/server.md and the README on the real SmolLM2, against `onekernel serve` as a user starts it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "http://127.0.0.1:8000"
DEMO_MODEL = ".venv/models/SmolLM2-135M-Instruct.Q4_1.gguf"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def blocks(language: str, mark: str) -> list[str]:
    """Code blocks about the server in the pages for users."""
    found = []
    for page in ("README.md", "docs/server.md"):
        found += re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.S | re.M)
    return list(dict.fromkeys(block for block in found if mark in block))


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path) -> Iterator[str]:
    """The command of the page, on a free port; its address."""
    [command] = blocks("sh", "onekernel serve .venv/")[-1:]
    words = command.split()
    assert words[:3] == ["onekernel", "serve", DEMO_MODEL]
    words[2] = str(smollm2_gguf)
    words[words.index("--port") + 1] = "0"
    environment = {name: value for name, value in os.environ.items() if name != "ONEKERNEL_API_KEY"}
    child = subprocess.Popen(
        [sys.executable, "-m", *words, "--ctx-size", "1024", "--threads", "1"],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert child.stderr is not None
    told = ""
    while "listening on" not in told:
        told = child.stderr.readline()
        assert told, "it ended before it listened"
    address = told.split()[2].rstrip(",")
    threading.Thread(target=child.stderr.read, daemon=True).start()
    try:
        deadline = time.monotonic() + 240
        while not _ready(address):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        yield address
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
    finally:
        child.kill()


def _ready(address: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{address}/health").status_code == 200
    return False


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", blocks("sh", "curl "))
def test_the_curl_examples_work(server: str, command: str) -> None:
    told = httpx.Response(200, content=run(["bash", "-c", command.replace(ADDRESS, server)])).json()
    assert "Paris" in told["choices"][0]["message"]["content"]


PYTHON = blocks("python", "from openai import")


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_the_examples_with_openais_client_work(server: str, code: str) -> None:
    assert ADDRESS in code
    told = run([sys.executable, "-c", code.replace(ADDRESS, server)])
    if "tools=" in code:
        assert told.startswith("get_weather {'city': ")
    elif "response_format=" in code:
        assert re.fullmatch(r"name='.*' country='.*'\n", told)
    else:
        assert "Paris" in told


def test_there_are_examples_of_streaming_tools_and_schemas() -> None:
    text = "".join(PYTHON)
    assert all(word in text for word in ("stream=True", "tools=", "response_format="))


def test_a_page_cannot_reach_it_by_another_name(server: str) -> None:
    assert httpx.get(f"{server}/v1/models", headers={"Host": "evil.example"}).status_code == 403
