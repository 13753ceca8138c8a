"""The ASGI application: routes, access, errors."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from onekernel.engine.engine import Engine
from onekernel.errors import OnekernelError
from onekernel.llm import LLM
from onekernel.server.access import Access
from onekernel.server.api_error import ApiError, as_api_error
from onekernel.server.chat import chat_completions
from onekernel.server.completions import completions
from onekernel.server.json_response import JsonResponse
from onekernel.server.metrics import metrics
from onekernel.server.models import health, list_models, one_model
from onekernel.server.openapi import openapi
from onekernel.server.page import page_routes
from onekernel.server.refused import PATHS, refused
from onekernel.server.service import Service
from onekernel.server.settings import ServerSettings
from onekernel.server.tokens import detokenize, tokenize


def create_app(model: LLM | Engine | Service, settings: ServerSettings | None = None) -> Starlette:
    """Return the application that serves a model; a `Service` may still be loading and brings its own settings."""
    if isinstance(model, Service):
        service = model
    else:
        service = Service(settings or ServerSettings(), model.loaded.engine if isinstance(model, LLM) else model)
    routes = [
        *page_routes(),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{name:path}", one_model, methods=["GET"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        *(Route(path, refused, methods=["GET", "POST"]) for path in PATHS),
    ]
    middleware = [Middleware(Access, service)]
    if service.settings.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=service.settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
        middleware.insert(0, cors)  # a browser asks first, without the key
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=_HANDLERS)
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


_HANDLERS: dict[Any, Any] = {ApiError: _error, HTTPException: _http_error, OnekernelError: _error, Exception: _error}
"""What answers for which error; the one for Exception only for what nobody expected, which it logs."""
