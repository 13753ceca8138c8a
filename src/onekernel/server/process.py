"""One server process: listen at once, load, serve, and end with the right exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import uvicorn
import uvloop

from onekernel.errors import ConfigError
from onekernel.llm import LLM
from onekernel.server.app import create_app
from onekernel.server.protocol import GuardedProtocol
from onekernel.server.service import Service

_log = logging.getLogger(__name__)

Note = Callable[[str], None]


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raises ConfigError with the reason if the address cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot listen on {host}, port {port}: {reason}; choose another --host or --port") from None


def serve(load: Callable[[], LLM], service: Service, listener: socket.socket, note: Note) -> int:
    """Serve until a signal or a failure; return the exit code: 0 after SIGINT or SIGTERM, 1 after an engine failure.

    `load` runs in a thread of its own while the socket already answers 503. Raises what `load` raises.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Process(load, service, note).run(listener))


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, which would end the process by the signal and not with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `_Process`."""
        yield


class _Process:
    """The parts of a running server and the order of its end."""

    def __init__(self, load: Callable[[], LLM], service: Service, note: Note) -> None:
        self._load = load
        self._service = service
        self._note = note
        self._llm: LLM | None = None
        self._load_error: BaseException | None = None
        self._loader: threading.Thread | None = None
        protocol = type("_Protocol", (GuardedProtocol,), {"head_timeout_s": service.settings.body_timeout_s})
        self._server = _Server(
            uvicorn.Config(
                create_app(service),
                http=protocol,
                log_config=None,
                log_level="error",  # clients that speak no HTTP are no news
                lifespan="off",
                ws="none",
                server_header=False,
                limit_concurrency=service.settings.max_connections,
                timeout_graceful_shutdown=int(service.settings.shutdown_s) + 5,
            )
        )

    async def run(self, listener: socket.socket) -> int:
        """Serve until the end; return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number)
        self._loader = threading.Thread(target=self._run_load, args=(loop,), name="onekernel-load", daemon=True)
        self._loader.start()
        watch = asyncio.create_task(self._watch())
        try:
            await self._server.serve(sockets=[listener])
        finally:
            watch.cancel()
        return await asyncio.to_thread(self._end)

    def _run_load(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._llm = self._load()
            self._service.ready(self._llm.loaded.engine)
        except BaseException as error:
            self._load_error = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._exit)

    def _stop(self, number: int) -> None:
        """Stop listening and let open requests end; after `shutdown_s` they are ended; a second signal does so now."""
        if self._server.should_exit:
            self._service.end_runs("the server is stopping")
            self._server.force_exit = True
            return
        self._note(f"{signal.Signals(number).name}: stopping")
        self._exit()

    def _exit(self) -> None:
        self._server.should_exit = True
        asyncio.get_running_loop().call_later(
            self._service.settings.shutdown_s, self._service.end_runs, "the server is stopping"
        )

    async def _watch(self) -> None:
        """End the process after an engine failure, so that whatever supervises it starts a new one."""
        while self._service.failure is None:
            await asyncio.sleep(0.2)
        self._note(f"the engine failed: {self._service.failure}")
        await asyncio.sleep(self._service.settings.failure_linger_s)
        self._exit()

    def _end(self) -> int:
        """Free the model and return the exit code."""
        failed = self._service.failure is not None
        if self._load_error is not None:
            raise self._load_error
        if self._llm is not None:
            try:
                self._llm.close()
            except Exception:
                _log.warning("closing the engine failed", exc_info=True)
                failed = True
        elif self._loader is not None and self._loader.is_alive():
            # Nothing can stop a thread that reads weights, and the interpreter must not end under it.
            sys.stderr.flush()
            os._exit(0)
        return 1 if failed else 0
