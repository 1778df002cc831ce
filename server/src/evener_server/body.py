"""A request's bytes to a JSON object. Whatever a client sends, the worst that comes of it is a 4xx."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from evener_server.errors import ApiError

#: Deeper JSON than any field needs, and far from what would exhaust a stack.
MAX_DEPTH = 64
#: A client that sends too much is read on for so many times the limit, so that it sees the answer, not a broken pipe.
_DISCARD_FACTOR = 4


@dataclass(frozen=True, kw_only=True)
class BodyLimits:
    """``max_bytes`` of a body, and ``timeout`` in seconds for all of it to arrive."""

    max_bytes: int = 16 << 20
    timeout: float = 60.0


async def read_object(request: Request, limits: BodyLimits) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        ApiError: 400, 408, 413 or 415.
    """
    _check_headers(request)
    try:
        raw = await asyncio.wait_for(_read(request, limits), limits.timeout)
    except asyncio.TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {limits.timeout:g} seconds", code="timeout") from error
    return decode_object(raw)


def decode_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``: UTF-8, no NaN or Infinity, no lone surrogates, at most ``MAX_DEPTH`` deep.

    Raises:
        ApiError: 400.
    """
    try:
        value = msgspec.json.decode(raw)
    except UnicodeDecodeError as error:
        raise _invalid(
            f"it is not UTF-8: byte {error.start} of a string is 0x{error.object[error.start]:02x}"
        ) from error
    except msgspec.MsgspecError as error:
        raise _invalid(str(error)) from error
    except RecursionError as error:
        raise _invalid("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise _invalid('it must be an object, as in {"model": …}')
    if _too_deep(value):
        raise _invalid(f"it is nested more than {MAX_DEPTH} deep")
    return value


def _invalid(why: str) -> ApiError:
    return ApiError(400, f"the body is not JSON that can be used: {why}", code="invalid_json")


def _check_headers(request: Request) -> None:
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    charset = dict(_parameter(p) for p in parameters.split(";")).get("charset", "utf-8")
    if kind.strip().lower() != "application/json" or charset not in ("utf-8", "utf8"):
        given = request.headers.get("content-type")
        raise ApiError(
            415,
            f"Content-Type is {given!r}; send JSON in UTF-8 with Content-Type: application/json",
            code="unsupported_media_type",
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(415, f"Content-Encoding is {encoding!r}; send the body as it is", code="unsupported_media_type")


def _parameter(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.strip().lower(), value.strip().strip('"').lower()


async def _read(request: Request, limits: BodyLimits) -> bytes:
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= limits.max_bytes:
                chunks.append(chunk)
            else:
                chunks.clear()
            if size > limits.max_bytes * _DISCARD_FACTOR:
                break
    except ClientDisconnect as error:
        # The answer goes nowhere, but the log line says why.
        raise ApiError(400, "the client went away before the body ended", code="client_disconnected") from error
    if size > limits.max_bytes:
        raise ApiError(
            413, f"the body is larger than {limits.max_bytes} bytes; send a shorter one", code="body_too_large"
        )
    return b"".join(chunks)


def _too_deep(value: Any) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for container in level:
            items = container.values() if type(container) is dict else container
            inner += [item for item in items if type(item) in (dict, list)]
        if not inner:
            return False
        level = inner
    return True
