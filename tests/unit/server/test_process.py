"""The process as a whole: listening while it loads, its end by a signal, by a failure, and its exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import onekernel
from tests.unit.server.serving import until

HI: list[Any] = [{"role": "user", "content": "Hi"}]
ROOT = Path(__file__).resolve().parents[3]


@contextlib.contextmanager
def process(mode: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a server process; yield it and its address."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(onekernel.__file__).parents[1]), str(ROOT)])}
    command = [sys.executable, "-m", "tests.unit.server.program", mode]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as child:
        assert child.stdout is not None
        try:
            yield child, f"http://127.0.0.1:{int(child.stdout.readline())}"
        finally:
            child.kill()


def wait_ready(address: str) -> None:
    def ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{address}/health").status_code == 200
        return False

    until(ready, 60)


def stream_in_thread(address: str) -> tuple[threading.Thread, list[str]]:
    """Read a stream in a thread; return it and the lines that it appends to."""
    lines: list[str] = []

    def read() -> None:
        body = {"messages": HI, "stream": True}
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=60) as answer:
            lines.extend(line for line in answer.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    return thread, lines


@pytest.mark.complaint(
    "K4",
    file="server/process.py",
    old="    def capture_signals(self) -> Iterator[None]:",
    new="    def do_not_capture_signals(self) -> Iterator[None]:",
)
def test_sigterm_lets_open_requests_end_and_exits_with_0() -> None:
    with process("slow") as (child, address):
        wait_ready(address)
        thread, lines = stream_in_thread(address)
        until(lambda: "running" in httpx.get(f"{address}/metrics").text and _running(address))
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0
        thread.join()
        assert lines[-1] == "data: [DONE]"
        assert '"finish_reason":"stop"' in lines[-2]
        assert _children(child.pid) == []


@pytest.mark.slow
def test_sigint_ends_requests_that_do_not_end_themselves() -> None:
    with process("endless") as (child, address):
        wait_ready(address)
        thread, lines = stream_in_thread(address)
        until(lambda: _running(address))
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 0
        thread.join()
        assert '"code":"stopped"' in lines[-2] and lines[-1] == "data: [DONE]"


@pytest.mark.slow
@pytest.mark.complaint("E1", file="server/process.py", old="        return 1 if failed else 0", new="        return 0")
def test_after_a_lost_device_the_process_ends_with_1() -> None:
    with process("failing") as (child, address):
        wait_ready(address)
        thread, lines = stream_in_thread(address)
        until(lambda: httpx.get(f"{address}/health").status_code == 503)
        assert "illegal address" in httpx.get(f"{address}/health").json()["reason"]
        assert child.wait(30) == 1
        thread.join()
        assert "illegal address" in lines[-2] and lines[-1] == "data: [DONE]"


@pytest.mark.slow
def test_the_port_answers_while_the_model_loads_and_a_signal_ends_that() -> None:
    with process("loading") as (child, address):

        def listening() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{address}/health").status_code == 503
            return False

        until(listening, 60)
        health = httpx.get(f"{address}/health")
        assert health.json()["status"] == "loading"
        told = httpx.post(f"{address}/v1/chat/completions", json={"messages": HI})
        assert (told.status_code, told.json()["error"]["code"]) == (503, "loading")
        assert told.headers["retry-after"] == "2"
        assert httpx.get(f"{address}/v1/models").json()["data"][0]["id"] == "model"
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_ends_the_process() -> None:
    with process("broken") as (child, _):
        assert child.wait(60) == 1
        assert child.stderr is not None
        assert "fetch them again" in child.stderr.read()


def _running(address: str) -> bool:
    return 'onekernel_queue{state="running"} 1.0' in httpx.get(f"{address}/metrics").text


def _children(pid: int) -> list[str]:
    done = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True, check=False)
    return done.stdout.split()
