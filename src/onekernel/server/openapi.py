"""GET /openapi.json: what can be asked for. Bodies come from the very types that requests are read as."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onekernel import __version__
from onekernel.server.fields import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from onekernel.server.json_response import JsonResponse

_BODIES = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)

_STATUSES = {
    "400": "the request is wrong; the message names the member, the value and the limit",
    "401": "the API key is missing or wrong",
    "403": "the host name is not allowed",
    "404": "the model is not served here",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "415": "the content type is not application/json",
    "429": "too many requests wait; Retry-After says when to try again",
    "503": "the model is loading, or the engine has failed or has no memory",
    "504": "the request took too long",
}


async def openapi(request: Request) -> Response:
    """Return the document."""
    return JsonResponse(document())


@cache
def document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    _, schemas = msgspec.json.schema_components(_BODIES, ref_template="#/components/schemas/{name}")
    object_schema = {"type": "object"}
    error = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "onekernel",
            "version": __version__,
            "description": "OpenAI's chat and completions API for one local model.",
        },
        "paths": {
            "/health": {"get": _operation("Whether requests are taken", {"200", "503"}, object_schema)},
            "/metrics": {"get": _operation("Metrics for Prometheus", {"200", "401"}, None)},
            "/v1/models": {"get": _operation("The names of the model", {"200", "401"}, object_schema)},
            "/v1/chat/completions": {"post": _posting("Answer a chat", "ChatBody", streams=True)},
            "/v1/completions": {"post": _posting("Continue a prompt", "CompletionBody", streams=True)},
            "/tokenize": {"post": _posting("Text or messages to token ids", "TokenizeBody")},
            "/detokenize": {"post": _posting("Token ids to text", "DetokenizeBody")},
        },
        "components": {
            "schemas": {**schemas, "Error": error},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _posting(summary: str, body: str, *, streams: bool = False) -> dict[str, Any]:
    operation = _operation(summary, {"200", *_STATUSES}, {"type": "object"})
    if streams:
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    schema = {"$ref": f"#/components/schemas/{body}"}
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _operation(summary: str, statuses: set[str], schema: dict[str, Any] | None) -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}} if schema is None else _json(schema)
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    for status in sorted(statuses - {"200"}):
        responses[status] = {"description": _STATUSES[status], "content": _json({"$ref": "#/components/schemas/Error"})}
    return {"summary": summary, "responses": responses}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
