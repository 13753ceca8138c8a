"""`onekernel serve` as users run it: a process of its own that can be watched, stopped and killed."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

START_S = 90.0


@dataclass
class ServerProcess:
    """A running server and where it listens."""

    process: subprocess.Popen[bytes]
    url: str

    @property
    def rss_bytes(self) -> int:
        """Memory of the process that is in RAM (Linux)."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def queue(self) -> float:
        """Requests in the engine, waiting or running."""
        metrics = httpx.get(f"{self.url}/metrics", timeout=60).text
        return sum(float(count) for count in re.findall(r"^onekernel_queue\{.*\} (\S+)$", metrics, re.MULTILINE))


@contextlib.contextmanager
def server_process(model: Path, *flags: str, port: int = 0) -> Iterator[ServerProcess]:
    """Start a server on one CPU thread and wait until it is ready; it gets a SIGTERM at the end and must exit with 0.

    A server that the caller has ended already is left as it is.
    """
    command = [sys.executable, "-m", "onekernel", "serve", str(model), "--device", "cpu", "--threads", "1"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, "--port", str(port), *flags], stdout=log, stderr=log)
        try:
            yield ServerProcess(process, _ready(process, log.fileno()))
            if process.poll() is None:
                process.terminate()
                assert process.wait(30) == 0, _text(log.fileno())
        finally:
            process.kill()
            process.wait()


def _ready(process: subprocess.Popen[bytes], log: int) -> str:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        if found := re.search(r"listening on (http://\S+),", _text(log)):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{found[1]}/health", timeout=60).status_code == 200:
                    return found[1]
        time.sleep(0.05)
    raise AssertionError(f"the server did not start: {_text(log)}")


def _text(log: int) -> str:
    return os.pread(log, 1 << 20, 0).decode(errors="replace")
