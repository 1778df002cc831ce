"""From a request's bytes in msgpack to a JSON-like object. Whatever a client sends, the result is one, or a 400."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
from starlette.requests import Request

from evener_server.body import BodyLimits, check_encoding, check_headers, check_shape, decode_object, read_bytes
from evener_server.errors import ApiError

MEDIA_TYPE = "application/x-msgpack"
#: Media types of requests in msgpack.
MEDIA_TYPES = frozenset({MEDIA_TYPE, "application/msgpack", "application/vnd.msgpack"})
#: A number needs one byte here and two in JSON: so many bytes for each item that a body may have.
_BYTES_PER_ITEM = 4
#: A run of numbers, booleans and nulls, which need no look at their values. Bounded, because the expression remembers
#: where each one begins.
_SCALARS = re.compile(
    rb"(?:[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]|[\xcc\xd0].|[\xcd\xd1].{2}|[\xca\xce\xd2].{4}|[\xcb\xcf\xd3].{8}){1,4096}",
    re.DOTALL,
)
#: How many bytes the length of a value has, by the value's first byte: of texts and bytes, and of lists and objects.
_TEXT_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_CONTAINER_LENGTHS = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}


def is_msgpack(request: Request) -> bool:
    """Whether a request says that its body is msgpack."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() in MEDIA_TYPES


async def read_either(request: Request, limits: BodyLimits, packed: bool) -> dict[str, Any]:
    """The object in a request's body, which is msgpack if ``packed``. Without a Content-Type it is JSON: KsanaLLM's
    clients send none. A page in a browser says where it is from (Origin), and needs the header.

    Raises:
        ApiError: 400, 408, 413 or 415.
    """
    if packed or not {"content-type", "origin"} & set(request.headers.keys()):
        check_encoding(request)
    else:
        check_headers(request)
    raw = await read_bytes(request, limits)
    # In a thread: of a large body, the look at its values alone takes a while.
    return await asyncio.to_thread(decode_msgpack if packed else decode_object, raw, limits)


def decode_msgpack(raw: bytes, limits: BodyLimits) -> dict[str, Any]:
    """The object in ``raw``: within ``limits``, and without bytes, dates and keys that are no text.

    Raises:
        ApiError: 400 or 413.
    """
    most = limits.max_items * _BYTES_PER_ITEM
    if len(raw) > most:
        raise ApiError(413, f"the body is larger than {most} bytes; send a shorter one", code="body_too_large")
    _check_counts(raw, limits)
    try:
        value = msgspec.msgpack.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError) as error:  # TypeError: a list as a key
        raise _invalid(str(error)) from error
    except RecursionError as error:
        raise _invalid("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise _invalid('it must be an object, as in {"model": …}')
    check_shape(value)
    _check_kinds(value)
    return value


def _check_counts(raw: bytes, limits: BodyLimits) -> None:
    """Count texts, objects and lists before they are made. Numbers are passed over in runs."""
    at, values = 0, 0
    while at < len(raw):
        run = _SCALARS.match(raw, at)
        if run is not None:
            at = run.end()
            continue
        values += 1
        if values > limits.max_values:
            message = f"the body has more than {limits.max_values} strings, objects and lists; send a smaller request"
            raise ApiError(400, message, code="too_many_values")
        at = _after_head(raw, at)


def _after_head(raw: bytes, at: int) -> int:
    """The position behind a text, or behind the head of a list or an object."""
    first = raw[at]
    if 0xA0 <= first <= 0xBF:
        return at + 1 + (first & 0x1F)
    if 0x80 <= first <= 0x9F:
        return at + 1
    if first in _CONTAINER_LENGTHS:
        return at + 1 + _CONTAINER_LENGTHS[first]
    if first in _TEXT_LENGTHS:
        size = _TEXT_LENGTHS[first]
        return at + 1 + size + int.from_bytes(raw[at + 1 : at + 1 + size], "big")
    raise _invalid(f"byte {at} is 0x{first:02x}, which is no number, text, list or object, or is cut off")


def _check_kinds(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    while level:
        inner: list[Any] = []
        for container in level:
            if type(container) is dict and set(map(type, container)) - {str}:
                raise _invalid("a key of an object is no text")
            items = list(container.values()) if type(container) is dict else container
            if bytes in set(map(type, items)):
                raise _invalid("it has bytes; send texts and numbers")
            inner += [item for item in items if type(item) in (dict, list)]
        level = inner


def _invalid(why: str) -> ApiError:
    return ApiError(400, f"the body is not valid msgpack for this API: {why}", code="invalid_msgpack")
