"""Requests of many kinds and the clients that send them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

Body = dict[str, Any]
Answer = tuple[str, str]
"""An answer's text and its finish_reason."""

PATH = "/v1/chat/completions"


def bodies(count: int) -> list[Body]:
    """Return different requests: short and long, streamed and whole, greedy and sampled, with and without stops."""
    return [
        {
            "messages": [{"role": "user", "content": f"Question {number}: {'and so on ' * (number * 7 % 60)}"}],
            "max_tokens": 8 + number % 17,
            "temperature": (0, 0.7, 1.3)[number % 3],
            "seed": number,
            "stream": number % 2 == 0,
            "stop": ["e"] if number % 5 == 0 else [],
            "ignore_eos": number % 4 != 0,
            "logprobs": number % 7 == 0,
        }
        for number in range(count)
    ]


async def ask(client: httpx.AsyncClient, body: Body) -> Answer:
    """Send a request; return its answer, from pieces if it is streamed. Raises for every kind of error."""
    if not body.get("stream"):
        response = await client.post(PATH, json=body)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]
    text, reason, done = "", None, False
    async with client.stream("POST", PATH, json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                choice = event["choices"][0]
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
    assert done and reason is not None
    return text, reason


async def ask_alone(client: httpx.AsyncClient, asked: list[Body]) -> list[Answer]:
    """Send requests one after another."""
    return [await ask(client, body) for body in asked]


async def ask_at_once(client: httpx.AsyncClient, asked: list[Body]) -> list[Answer]:
    """Send requests all at once."""
    return list(await asyncio.gather(*(ask(client, body) for body in asked)))


def http_client(url: str, connections: int) -> httpx.AsyncClient:
    """Return a client with patience and as many connections as clients that it stands for."""
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx.AsyncClient(base_url=url, timeout=120, limits=limits)
