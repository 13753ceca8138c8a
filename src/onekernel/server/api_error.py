"""What went wrong, in OpenAI's JSON form, without paths or stack traces."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from onekernel.config import SamplingParams
from onekernel.errors import (
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    MemoryLimitError,
    OnekernelError,
    QueueFullError,
    TemplateError,
)

_log = logging.getLogger(__name__)

_PATH = re.compile(r"(?<![\w<.:/])~?/(?:[^\s/'\"<>]+/)+([^\s/'\"<>]*)")
_FIELD = re.compile(r"[a-z][a-z_]+(?= )")
_FIELDS = frozenset(SamplingParams.__dataclass_fields__)


class ApiError(Exception):
    """An answer that is an error: HTTP status and the members of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for a request that can never be answered as it is."""
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: BaseException) -> ApiError:
    """Return what a client is told about an exception; an unexpected one is logged and not described."""
    if isinstance(error, ApiError):
        return error
    message = without_paths(str(error))
    if isinstance(error, ContextLengthError):
        return bad_request(message, code="context_length_exceeded")
    if isinstance(error, TemplateError):
        return bad_request(message, "messages")
    if isinstance(error, ConfigError):
        field = _FIELD.match(message)
        return bad_request(message, field[0] if field and field[0] in _FIELDS else None, "invalid_value")
    if isinstance(error, QueueFullError):
        return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, EngineClosedError):
        return ApiError(503, message, kind="server_error", code="engine_unavailable")
    if isinstance(error, MemoryLimitError):
        return ApiError(503, message, kind="server_error", code="out_of_memory", headers={"Retry-After": "1"})
    if isinstance(error, OnekernelError):
        return ApiError(500, message, kind="server_error", code=type(error).__name__)
    _log.error("a request failed unexpectedly", exc_info=error)
    return ApiError(
        500, f"the server failed on this request ({type(error).__name__}); its log says why", kind="server_error"
    )


def without_paths(text: str) -> str:
    """Return the text with absolute paths cut down to their last name."""
    return _PATH.sub(r"\1", text)
