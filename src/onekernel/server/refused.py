"""Endpoints of OpenAI's API that are not built in: said at once and by name."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from onekernel.server.api_error import ApiError

_INSTEAD = {
    "/v1/embeddings": "this server generates text; embeddings need a model and a server made for them",
    "/v1/responses": "use /v1/chat/completions",
    "/v1/audio/speech": "answers are text",
    "/v1/audio/transcriptions": "prompts are text",
    "/v1/images/generations": "answers are text",
    "/v1/moderations": "use a model made for it",
}

PATHS = tuple(_INSTEAD)


async def refused(request: Request) -> Response:
    """Answer 501 and say what to use."""
    path = request.url.path
    raise ApiError(501, f"{path} is not supported: {_INSTEAD[path]}", code="unsupported_endpoint")
