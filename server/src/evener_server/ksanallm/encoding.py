"""How answers and errors of KsanaLLM's API are written: in JSON, or in msgpack for requests in msgpack."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request

from evener_server.errors import ERROR_SCHEMA as OPENAI_ERROR_SCHEMA
from evener_server.errors import ApiError
from evener_server.msgpack_body import MEDIA_TYPE, is_msgpack
from evener_server.streaming import to_json

#: Of a stream in JSON: its pieces are JSON, but the whole is not, and each ends with a zero byte. KsanaLLM's server
#: names no type, its router this one.
STREAM_MEDIA_TYPE = "application/octet-stream"
#: The body of every error, for the API's description.
ERROR_SCHEMA: Mapping[str, Any] = {
    "type": "object", "required": ["message", "code", "error"],
    "properties": {"message": {"type": "string"}, "code": {"type": "integer"}, **OPENAI_ERROR_SCHEMA["properties"]},
}  # fmt: skip


@dataclass(frozen=True)
class Encoding:
    """One of the two.

    Attributes:
        packed: msgpack.
    """

    packed: bool

    @classmethod
    def of(cls, request: Request) -> Encoding:
        """The one of a request."""
        return cls(is_msgpack(request))

    @property
    def media_type(self) -> str:
        """The media type of an answer."""
        return MEDIA_TYPE if self.packed else "application/json"

    @property
    def stream_media_type(self) -> str:
        """The media type of a stream."""
        return MEDIA_TYPE if self.packed else STREAM_MEDIA_TYPE

    def write(self, value: Any) -> bytes:
        """An answer."""
        return msgspec.msgpack.encode(value) if self.packed else to_json(value)

    def write_piece(self, value: Any) -> bytes:
        """A piece of a stream. JSON ends with a zero byte; an object in msgpack says itself where it ends."""
        return self.write(value) + (b"" if self.packed else b"\0")

    def tensor(self, data: bytes, shape: list[int]) -> Mapping[str, Any]:
        """A float32 array in the host's byte order, as base64: a text in JSON, bytes in msgpack."""
        text = base64.b64encode(data)
        return {"data": text if self.packed else text.decode("ascii"), "shape": shape, "dtype": "float32"}

    def use_for_errors(self, request: Request) -> None:
        """Let errors of a request be written in this way, too."""
        write: Callable[[Any], bytes] = self.write if self.packed else _ascii
        request.state.error_media_type = self.media_type
        request.state.error_format = lambda error: write(error_object(error))


def described(schema: Mapping[str, Any], streams: bool) -> dict[str, Any]:
    """What an endpoint answers, for the API's description.

    Args:
        schema: of a whole answer in JSON; ``streams``: the answer may be a stream.
    """
    content: dict[str, Any] = {"application/json": {"schema": schema}, MEDIA_TYPE: {"schema": {}}}
    if not streams:
        return {"description": "In the type of the request.", "content": content}
    content[STREAM_MEDIA_TYPE] = {"schema": {"type": "string", "format": "binary"}}
    text = (
        "Whole in the type of the request. A stream to a request in JSON has JSON objects, each with all so far and a "
        "zero byte after it; to one in msgpack, such objects one after another."
    )
    return {"description": text, "content": content}


def error_object(error: ApiError) -> Mapping[str, Any]:
    """An error with KsanaLLM's fields, and with OpenAI's object beside them."""
    whole = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return {"message": error.message, "code": error.status, "error": whole}


def _ascii(value: Any) -> bytes:
    """JSON in ASCII, so that it can quote whatever a client sent."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")
