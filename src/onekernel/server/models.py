"""GET /v1/models and /health: what is served, and whether it is ready."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from onekernel.server.json_response import JsonResponse
from onekernel.server.service import Service

_STARTED = int(time.time())


async def list_models(request: Request) -> Response:
    """List every name of the model."""
    service: Service = request.app.state.service
    return JsonResponse({"object": "list", "data": [_model(service, name) for name in service.settings.model_names]})


async def one_model(request: Request) -> Response:
    """Describe one model; 404 for a name that is not served."""
    service: Service = request.app.state.service
    return JsonResponse(_model(service, service.model_named(request.path_params["name"])))


async def health(request: Request) -> Response:
    """Say 200 when requests are taken, else 503 with the reason."""
    service: Service = request.app.state.service
    if (refusal := service.refusal) is None:
        return JsonResponse({"status": "ok"})
    return JsonResponse({"status": service.state, "reason": refusal.message}, refusal.status, headers=refusal.headers)


def _model(service: Service, name: str) -> dict[str, Any]:
    model: dict[str, Any] = {"id": name, "object": "model", "created": _STARTED, "owned_by": "onekernel"}
    if service.loaded_engine is not None:
        model["max_model_len"] = service.loaded_engine.backend.max_context
    if service.read_limit_us is not None:
        model["onekernel"] = {"read_limit_us": round(service.read_limit_us, 2)}
    return model
