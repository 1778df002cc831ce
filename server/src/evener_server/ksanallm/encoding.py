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
        """Of an answer."""
        return MEDIA_TYPE if self.packed else "application/json"

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


def error_object(error: ApiError) -> Mapping[str, Any]:
    """An error with KsanaLLM's fields, and with OpenAI's object beside them."""
    whole = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return {"message": error.message, "code": error.status, "error": whole}


def _ascii(value: Any) -> bytes:
    """JSON in ASCII, so that it can quote whatever a client sent."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")
