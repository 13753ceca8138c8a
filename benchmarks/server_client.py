"""The client of benchmarks/server.py, in a process of its own: it must not share an interpreter with the server.

    python benchmarks/server_client.py URL < requests.json > answers.json

Sends all requests at once, each streamed on its own connection, and notes when pieces of the answers arrive; they are
read only after the last has arrived. Standard library only, so that it starts fast.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

READ_BYTES = 1 << 16
TIMEOUT_S = 600


def ask(host: str, body: dict[str, Any], start: Barrier) -> dict[str, Any]:
    """Return the times of one answer and its tokens, or what went wrong."""
    connection = http.client.HTTPConnection(host, timeout=TIMEOUT_S)
    arrived: list[tuple[float, bytes]] = []
    try:
        connection.connect()
        start.wait()
        sent = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        while piece := response.read1(READ_BYTES):
            arrived.append((time.perf_counter(), piece))
        if response.status != 200:
            return {"error": f"status {response.status}: {b''.join(piece for _, piece in arrived)[:200]!r}"}
        return read(sent, arrived)
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        connection.close()


def read(sent: float, arrived: list[tuple[float, bytes]]) -> dict[str, Any]:
    """Return the times of an answer from the pieces of its event stream; raises ValueError if it is not whole."""
    times: list[float] = []
    tokens, rest, done = 0, b"", False
    for moment, piece in arrived:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                done = True
            elif event.startswith(b"data: "):
                chunk = json.loads(event.removeprefix(b"data: "))
                if "error" in chunk:
                    raise ValueError(chunk["error"]["message"])
                tokens = chunk.get("timings", {}).get("predicted_n", tokens)
                times += [moment] * any(choice["text"] for choice in chunk["choices"])
    if not done or tokens < 2 or not times:
        raise ValueError(f"{tokens} tokens, done: {done}")
    return {
        "us_per_token": (times[-1] - times[0]) / (tokens - 1) * 1e6,
        "whole_us": (times[-1] - sent) / tokens * 1e6,
        "ttft_ms": (times[0] - sent) * 1e3,
        "tokens": tokens,
    }


def main() -> None:
    bodies = json.load(sys.stdin)
    start = Barrier(len(bodies))
    host = sys.argv[1].removeprefix("http://")
    with ThreadPoolExecutor(len(bodies)) as pool:
        json.dump(list(pool.map(lambda body: ask(host, body, start), bodies)), sys.stdout)


if __name__ == "__main__":
    main()
