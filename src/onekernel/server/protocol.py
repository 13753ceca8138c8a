"""HTTP/1.1 of one connection, with limits that uvicorn does not have: on the time and the size of a request's head."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from httptools import HttpParserUpgrade
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 2**10


class GuardedProtocol(HttpToolsProtocol):
    """Closes a connection whose request line and headers are too long or come too slowly (slow-loris).

    `head_timeout_s` is set by whoever makes the server; the time of the body is `read_body`'s to limit.
    """

    head_timeout_s = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read = self._reread = b""
        self._head_bytes = 0
        self._in_head = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock of the first head."""
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; refuse a head that is too long."""
        if self._in_head:
            self._head_bytes += len(data)
        self._reread = data
        while self._reread:
            self._read, self._reread = self._reread, b""
            super().data_received(self._read)
        self._read = b""
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        """Start the clock of a further head on this connection."""
        super().on_message_begin()
        if not self._in_head:
            self._begin_head()

    def on_headers_complete(self) -> None:
        """Stop the clock; refuse a head that is too long but came in one piece."""
        self._end_head()
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")
            raise ValueError("the head is too long")  # ends the parser, which has us send a 400
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser cannot read, unless it has been refused already."""
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def _should_upgrade(self) -> bool:
        """Have uvicorn leave every request for another protocol to `handle_websocket_upgrade`."""
        return any(name == b"upgrade" for name, _ in self.headers)

    def handle_websocket_upgrade(self) -> None:
        """Answer a request for another protocol, such as curl's for HTTP/2, in this one, as if it had not asked.

        The parser has taken the head alone, as what follows would not be HTTP; it gets both again, without the Upgrade.
        """
        paused = sys.exception()  # which uvicorn handles while it calls this, and which says where the head ends
        end = paused.args[0] if isinstance(paused, HttpParserUpgrade) else len(self._read)
        version = self.parser.get_http_version().encode()
        kept = [name + b": " + value + b"\r\n" for name, value in self.headers if name != b"upgrade"]
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n", *kept, b"\r\n"]
        self._reread = b"".join(head) + self._read[end:]

    def _begin_head(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._refuse, b"408 Request Timeout")

    def _end_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: bytes) -> None:
        self._end_head()
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()
