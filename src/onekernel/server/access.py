"""Who may use the server: host names, the API key, and counting what came of each request."""

from __future__ import annotations

import hmac
import logging

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onekernel.server.api_error import ApiError
from onekernel.server.json_response import JsonResponse
from onekernel.server.service import Service

_log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/health", "/openapi.json"})
OPEN_FOLDER = "/static/"
"""What needs no key: the page itself, its files, what a load balancer asks for."""


class Access:
    """ASGI middleware that lets a request through, or answers 401 or 403."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._metrics = service.metrics
        self._hosts = frozenset(service.settings.allowed_hosts)
        key = service.settings.api_key
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")  # its pattern, not what was asked for: there are only a few
                self._metrics.requests.labels(getattr(route, "path", "other"), message["status"]).inc()
                _log.info("%s %.200r: %d", scope["method"], scope["path"], message["status"])
            await send(message)

        refusal = self._refusal(scope["path"], Headers(scope=scope))
        if refusal is None:
            await self._app(scope, receive, counted)
        else:
            await JsonResponse(refusal.body(), refusal.status, headers=refusal.headers)(scope, receive, counted)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        host = _name_of(headers.get("host", ""))
        if self._hosts and host not in self._hosts:
            return ApiError(
                403, f"the host {host[:100]!r} is not allowed; start the server with --allowed-host to allow it"
            )
        if self._key is None or path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._key):
            return None
        return ApiError(
            401,
            "this server needs its API key, as `Authorization: Bearer KEY`",
            kind="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _name_of(host: str) -> str:
    """Return a Host header without its port."""
    if host.startswith("["):
        return host.partition("]")[0].removeprefix("[").lower()
    return host.partition(":")[0].lower()
