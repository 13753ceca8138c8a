"""The chat page at `/`: a fixed table of files, read once. No part of a request's path is looked up on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_TYPES = {
    "app.js": "text/javascript",
    "api.js": "text/javascript",
    "elements.js": "text/javascript",
    "icon.svg": "image/svg+xml",
    "index.html": "text/html",
    "markdown.js": "text/javascript",
    "messages.js": "text/javascript",
    "settings.js": "text/javascript",
    "speed.js": "text/javascript",
    "store.js": "text/javascript",
    "style.css": "text/css",
}

_HEADERS = {
    # Only own scripts and styles, none inline; Trusted Types without a policy makes innerHTML and the like throw.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes() -> list[Route]:
    """Return the routes of the page, `/` and `/static/...`. They need no API key: they hold nothing of the model."""
    return [
        Route(
            "/" if name == "index.html" else f"/static/{name}", _serve(name), methods=["GET"], include_in_schema=False
        )
        for name in _TYPES
    ]


def _serve(name: str) -> Callable[[Request], Awaitable[Response]]:
    body = files("onekernel.server").joinpath("static", name).read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    headers = {**_HEADERS, "ETag": tag}

    async def endpoint(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=_TYPES[name])

    return endpoint
