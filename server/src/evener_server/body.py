"""From a request's bytes to a JSON object. Whatever a client sends, the result is a JSON object or a 4xx error."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from evener_server.errors import ApiError

#: More than any field needs, and far less than would exhaust the stack.
MAX_DEPTH = 64
#: Fields of one object. ``logit_bias`` has the most, and fewer than this.
MAX_KEYS = 1024
#: A body that is too large is still read up to this many times the limit, so that the client gets the error response
#: and not a broken pipe.
_DISCARD_FACTOR = 4


@dataclass(frozen=True, kw_only=True)
class BodyLimits:
    """Limits of a request's body.

    Attributes:
        max_bytes: its size.
        timeout: seconds for all of it to arrive.
        max_values: strings (keys included), objects and lists in it.
        max_items: commas between values, so that it bounds the token ids of prompts given as ids.
    """

    max_bytes: int = 16 << 20
    timeout: float = 60.0
    max_values: int = 1 << 17
    max_items: int = 1 << 21


async def read_object(request: Request, limits: BodyLimits) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        ApiError: 400, 408, 413 or 415.
    """
    check_headers(request)
    return decode_object(await read_bytes(request, limits), limits)


async def read_bytes(request: Request, limits: BodyLimits) -> bytes:
    """A request's body.

    Raises:
        ApiError: 400, 408 or 413.
    """
    try:
        return await asyncio.wait_for(_read(request, limits), limits.timeout)
    except asyncio.TimeoutError as error:
        # The rest of the body may still come: it must not be read as the next request.
        raise ApiError(
            408, f"the body did not arrive within {limits.timeout:g} seconds", code="timeout",
            headers={"Connection": "close"},
        ) from error  # fmt: skip


def decode_object(raw: bytes, limits: BodyLimits) -> dict[str, Any]:
    """The JSON object in ``raw``: UTF-8, no NaN or Infinity, no lone surrogates, at most ``MAX_DEPTH`` deep, and within
    ``limits``.

    Raises:
        ApiError: 400.
    """
    _check_counts(raw, limits)
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
    check_shape(value)
    return value


def _check_counts(raw: bytes, limits: BodyLimits) -> None:
    """Count values in the text, before an object is made for each of them: a few passes in C over the bytes."""
    # An escaped quote does not end a string, and a backslash may be escaped itself.
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw
    strings = plain.count(b'"') // 2
    if strings <= limits.max_values:
        outside = b"".join(plain.split(b'"')[::2])
        values = strings + outside.count(b"{") + outside.count(b"[")
        if values <= limits.max_values and outside.count(b",") <= limits.max_items:
            return
    raise ApiError(
        400, f"the body has more than {limits.max_values} strings, objects and lists, or more than {limits.max_items} "
        "items; send a smaller request", code="too_many_values",
    )  # fmt: skip


def _invalid(why: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON for this API: {why}", code="invalid_json")


def check_headers(request: Request) -> None:
    """Raises:
    ApiError: 415, the body is not plain JSON in UTF-8.
    """
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    charset = dict(_parameter(p) for p in parameters.split(";")).get("charset", "utf-8")
    if kind.strip().lower() != "application/json" or charset not in ("utf-8", "utf8"):
        given = request.headers.get("content-type")
        found = "is missing" if given is None else f"is {given!r}"
        raise ApiError(
            415,
            f"Content-Type {found}; send JSON in UTF-8 with Content-Type: application/json",
            code="unsupported_media_type",
        )
    check_encoding(request)


def check_encoding(request: Request) -> None:
    """Raises:
    ApiError: 415, the body is compressed.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(415, f"Content-Encoding is {encoding!r}; send the body unencoded", code="unsupported_media_type")


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
        # No client gets this response, but the log line has the reason.
        raise ApiError(400, "the client disconnected before the body ended", code="client_disconnected") from error
    if size > limits.max_bytes:
        raise ApiError(
            413, f"the body is larger than {limits.max_bytes} bytes; send a shorter one", code="body_too_large"
        )
    return b"".join(chunks)


def check_shape(value: dict[str, Any]) -> None:
    """Raises:
    ApiError: 400, it is too deep, or an object has too many fields.
    """
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for container in level:
            if type(container) is dict and len(container) > MAX_KEYS:
                raise ApiError(400, f"an object in the body has more than {MAX_KEYS} fields", code="too_many_values")
            items = container.values() if type(container) is dict else container
            inner += [item for item in items if type(item) in (dict, list)]
        if not inner:
            return
        level = inner
    raise _invalid(f"it is nested more than {MAX_DEPTH} levels deep")
