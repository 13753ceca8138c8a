"""Who may use a server: keys, host names, other pages; what it says of itself without a key."""

from __future__ import annotations

import hmac
import re
import socket
import time
from typing import Any

import httpx
import pytest

from onekernel.errors import ConfigError
from onekernel.server.app import create_app
from onekernel.server.service import Service
from onekernel.server.settings import ServerSettings
from tests.unit.server.conftest import Start
from tests.unit.server.serving import serving

KEY = "s3cret-key"


def test_a_key_is_needed_where_one_is_set(scripted: Start) -> None:
    server = scripted(settings=ServerSettings(api_key=KEY))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"Authorization": "Bearer é"}):
        raw = {name: value.encode() for name, value in headers.items()}
        told = server.http.post("/v1/chat/completions", json={}, headers=raw)
        assert told.status_code == 401
        assert told.json()["error"]["code"] == "invalid_api_key"
        assert told.headers["www-authenticate"] == "Bearer"
    assert server.http.get("/metrics").status_code == 401
    assert server.http.get("/v1/models").status_code == 401
    good = {"Authorization": f"Bearer {KEY}"}
    assert server.http.get("/v1/models", headers=good).status_code == 200
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    assert server.http.post("/v1/chat/completions", json=body, headers=good).status_code == 200


@pytest.mark.parametrize("path", ["/", "/health", "/openapi.json", "/static/app.js"])
def test_the_page_and_health_need_no_key(scripted: Start, path: str) -> None:
    server = scripted(settings=ServerSettings(api_key=KEY))
    assert server.http.get(path).status_code == 200


def test_keys_are_compared_in_constant_time(scripted: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = scripted(settings=ServerSettings(api_key=KEY))
    compared: list[tuple[bytes, bytes]] = []

    def noted(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return False

    monkeypatch.setattr(hmac, "compare_digest", noted)
    assert server.http.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"}).status_code == 401
    assert compared == [(KEY.encode(), KEY.encode())]


def test_only_the_named_hosts_are_answered(scripted: Start) -> None:
    """A page that makes its own name point here (DNS rebinding) sends that name as the host."""
    server = scripted(settings=ServerSettings(allowed_hosts=("127.0.0.1", "localhost", "::1")))
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000"):
        assert server.http.get("/health", headers={"Host": host}).status_code == 200
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "[::2]"):
        assert server.http.get("/health", headers={"Host": host}).status_code == 403


def test_other_pages_are_not_let_in_unless_they_are_named(scripted: Start) -> None:
    ask: dict[str, Any] = {
        "headers": {
            "Origin": "https://chat.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
    }
    closed = scripted()
    assert "access-control-allow-origin" not in closed.http.options("/v1/chat/completions", **ask).headers
    opened = scripted(settings=ServerSettings(cors_origins=("https://chat.example",), api_key=KEY))
    told = opened.http.options("/v1/chat/completions", **ask)
    assert told.status_code == 200
    assert told.headers["access-control-allow-origin"] == "https://chat.example"
    other = {"headers": {**ask["headers"], "Origin": "https://evil.example"}}
    assert "access-control-allow-origin" not in opened.http.options("/v1/chat/completions", **other).headers


def answers(connection: socket.socket) -> list[bytes]:
    """Read until the server closes; return the statuses."""
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return re.findall(rb"HTTP/1.1 (\d+)", data)


@pytest.mark.parametrize("cut", [0, 20, 150, 240])
def test_a_request_for_another_protocol_is_answered_in_this_one(http: httpx.Client, cut: int) -> None:
    """As `curl --http2` sends it; it comes in two pieces, and other requests follow on its connection."""
    body = b'{"content": "Hi"}'
    post = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 17\r\n"
    h2c = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    socket_like = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    requests = [post + h2c + b"\r\n" + body, socket_like + b"\r\n", post + b"connection: close\r\n\r\n" + body]
    raw = b"".join(requests)
    with socket.create_connection((http.base_url.host, http.base_url.port), timeout=30) as connection:
        for piece in (raw[:cut], raw[cut:]):
            connection.sendall(piece)
            time.sleep(0.02)  # so that the server most likely reads them one by one
        assert answers(connection) == [b"200"] * 3


def test_a_head_that_is_too_long_or_too_slow_is_cut() -> None:
    with serving(create_app(Service(ServerSettings())), head_timeout_s=0.3) as address:
        where = ("127.0.0.1", int(address.rpartition(":")[2]))
        with socket.create_connection(where, timeout=30) as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n")
            assert slow.recv(1000).startswith(b"HTTP/1.1 408")
        with socket.create_connection(where, timeout=30) as silent:
            assert silent.recv(1000).startswith(b"HTTP/1.1 408")
        with socket.create_connection(where, timeout=30) as long:
            long.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 80_000)
            assert long.recv(1000).startswith(b"HTTP/1.1 431")
        with socket.create_connection(where, timeout=30) as at_once:
            at_once.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 70_000 + b"\r\n\r\n")
            assert answers(at_once) == [b"431"]
        with socket.create_connection(where, timeout=30) as broken:
            broken.sendall(b"this is no HTTP\r\n\r\n")
            assert broken.recv(1000).startswith(b"HTTP/1.1 400")
        with httpx.Client(base_url=address) as kept:  # several requests on one connection
            assert [kept.get("/health").status_code for _ in range(3)] == [503] * 3


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"model_names": ()}, "model_names"),
        ({"model_names": ("",)}, "model_names"),
        ({"api_key": ""}, "key"),
        ({"api_key": "schlüssel"}, "key"),
        ({"request_timeout_s": 0}, "request_timeout_s"),
        ({"shutdown_s": -1}, "shutdown_s"),
        ({"max_choices": 0}, "max_choices"),
    ],
)
def test_settings_that_make_no_sense_are_named(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ServerSettings(**wrong)
