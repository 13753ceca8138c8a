"""The ASGI application: routes, access, errors."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from onekernel.engine.engine import Engine
from onekernel.llm import LLM
from onekernel.server.api_error import ApiError, as_api_error
from onekernel.server.chat import chat_completions
from onekernel.server.json_response import JsonResponse
from onekernel.server.models import health, list_models, one_model
from onekernel.server.page import page_routes
from onekernel.server.service import Service
from onekernel.server.settings import ServerSettings


def create_app(model: LLM | Engine | Service, settings: ServerSettings | None = None) -> Starlette:
    """Return the application that serves a model; a `Service` may still be loading and brings its own settings."""
    if isinstance(model, Service):
        service = model
    else:
        service = Service(settings or ServerSettings(), model.loaded.engine if isinstance(model, LLM) else model)
    app = Starlette(
        routes=[
            *page_routes(),
            Route("/health", health, methods=["GET"]),
            Route("/v1/models", list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", one_model, methods=["GET"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _error},
    )
    app.add_exception_handler(ApiError, _error)
    app.state.service = service
    return app


async def _error(request: Request, error: Exception) -> Response:
    told = as_api_error(error)
    return JsonResponse(told.body(), told.status, headers=told.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = {404: "there is no such endpoint", 405: "this endpoint does not take that method"}.get(status, "refused")
    told = ApiError(status, f"{request.method} {request.url.path[:200]}: {detail}; /openapi.json lists all endpoints")
    return JsonResponse(told.body(), status)
