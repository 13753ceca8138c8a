"""Read a request's body within limits, and turn it into a typed object."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from onekernel.server.api_error import ApiError, bad_request
from onekernel.server.fields import IGNORED, REFUSED, Body
from onekernel.server.settings import ServerSettings

_log = logging.getLogger(__name__)

Parsed = TypeVar("Parsed", bound=Body)

_AT = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
_warned: set[str] = set()


async def read_body(request: Request, kind: type[Parsed], settings: ServerSettings) -> Parsed:
    """Return the body as `kind`; raises ApiError 408, 413, 415 or 400 naming the field."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # A web page may send other types to any server without asking it first; JSON it may not.
        raise ApiError(
            415, f"the content type is {media_type[:80] or 'missing'!r}; send `Content-Type: application/json`"
        )
    return parse(await _read(request, settings), kind)


async def _read(request: Request, settings: ServerSettings) -> bytes:
    limit = settings.max_body_bytes
    too_large = ApiError(
        413,
        f"the body has more than {limit} bytes; send less, or start the server with a larger --max-body-bytes",
        headers={"Connection": "close"},
    )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {settings.body_timeout_s:g} s", headers={"Connection": "close"}
        ) from None
    except ClientDisconnect:
        raise ApiError(400, "the client left before its request was complete") from None
    return b"".join(parts)


def parse(raw: bytes, kind: type[Parsed]) -> Parsed:
    """Return a JSON body as `kind`; raises ApiError naming what is wrong and where."""
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise bad_request(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise bad_request("the body is not a JSON object")
    _look_at_unknown(data, kind)
    try:
        return msgspec.convert(data, kind, str_keys=True)
    except (msgspec.MsgspecError, RecursionError) as error:
        message = str(error)
        place = _AT.search(message)
        name = place[1] if place else None
        found = message.removesuffix(place[0]) if place else message
        raise bad_request(f"{name}: {found}" if name else found, name or None, "invalid_type") from None


def _look_at_unknown(data: dict[str, Any], kind: type[Body]) -> None:
    """Refuse members that would change the answer and are not built in; warn once of others that nobody knows."""
    for name in data.keys() - set(kind.__struct_fields__):
        if name in REFUSED:
            neutral, advice = REFUSED[name]
            if data[name] not in neutral:
                raise bad_request(f"{name} is not supported; {advice}", name[:100], "unsupported_parameter")
        elif name not in IGNORED and name not in _warned and len(_warned) < 1000:
            _warned.add(name)
            _log.warning("requests hold the unknown member %.80r, which is ignored", name)
