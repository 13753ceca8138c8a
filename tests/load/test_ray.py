"""Two replicas under Ray Serve on one machine: requests spread, and one that is killed is replaced."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from onekernel import LLM, SamplingParams
from onekernel.errors import ConfigError
from tests.unit.server.serving import until, write_chatting

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("load"),
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments"),  # in Ray's own modules
]

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = 4
REQUESTS = 24
HI = [{"role": "user", "content": "What is the capital of France?"}]
BODY = {"messages": HI, "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chatting(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    """The address of an application with two replicas."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RAY_AUTH_MODE": "disabled",  # a token would be kept in the home directory
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        }.items():
            patch.setenv(name, value)
        import ray
        from ray import serve

        from onekernel.server.ray import application

        # Not pytest's folder: a Unix socket's path has at most 107 characters.
        folder = tempfile.mkdtemp(prefix="ray-")
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=80 * 2**20,
            _temp_dir=folder,
        )
        port = _free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        arguments = {
            "model": str(model),
            "replicas": "2",  # as `serve run ... replicas=2` gives it
            "gpus_per_replica": 0,
            "load_format": "dummy",
            "engine": {"device": "cpu", "threads": 1, "max_context": 512},
            "server": {"model_names": ["tiny"]},
        }
        serve.run(application(arguments))
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def replica_pids() -> set[int]:
    """Return the processes that Ray has titled as replicas."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if "ServeReplica" in " ".join(process.cmdline()):
                found.add(process.pid)
        except psutil.Error:
            pass
    return found


def post(url: str, body: dict[str, Any] = BODY) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def test_two_replicas_share_the_requests_and_say_what_one_engine_would(url: str, model: Path) -> None:
    with LLM(str(model), device="cpu", threads=1, load_format="dummy", max_context=512) as llm:
        expected = llm.generate(HI, SamplingParams(max_tokens=12, temperature=0.0)).text
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda _: post(url), range(REQUESTS)))
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["choices"][0]["message"]["content"] for answer in answers} == {expected}
    assert post(url, {**BODY, "temperature": -1}).status_code == 400
    streamed = post(url, {**BODY, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert len(replica_pids()) == 2
    counts = set()

    def both_seen() -> bool:
        """Each replica counts its own answers, and any of them may answer here."""
        text = httpx.get(f"{url}/metrics").text
        counts.add(sum(float(n) for n in re.findall(r"^onekernel_answers_total\{.*\} (\S+)$", text, re.MULTILINE)))
        return sum(counts) == REQUESTS + 1

    until(both_seen)
    assert len(counts) == 2 and min(counts) > REQUESTS / 8


def test_a_killed_replica_is_replaced_and_no_later_request_fails(url: str) -> None:
    before = replica_pids()
    victim = min(before)
    outcomes: list[tuple[float, bool]] = []
    end = threading.Event()

    def one_client() -> None:
        while not end.is_set():
            begun = time.monotonic()
            try:
                fine = post(url).status_code == 200
            except httpx.TransportError:
                fine = False
            outcomes.append((begun, fine))

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(one_client) for _ in range(CLIENTS)]
        time.sleep(1)
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        try:
            until(lambda: len(replica_pids() - {victim}) == 2, 120)
            time.sleep(1)
        finally:
            end.set()
        for client in clients:
            client.result()
    assert len(outcomes) > CLIENTS
    failed = [begun for begun, fine in outcomes if not fine]
    assert len(failed) <= CLIENTS
    assert all(begun <= killed for begun in failed), [begun - killed for begun in failed]
    assert sum(begun > killed for begun, _ in outcomes) > CLIENTS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "m", "replcas": 2}, "replcas"),
        ({"model": "m", "replicas": "two"}, "replicas"),
        ({"model": "m", "engine": {"max_context": 1}}, "max_context"),
        ({"model": "m", "server": {"max_choices": 0}}, "max_choices"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(arguments: dict[str, Any], words: str) -> None:
    from onekernel.server.ray import application

    with pytest.raises(ConfigError, match=words):
        application(arguments)
