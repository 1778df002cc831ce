"""Every error in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from evener.errors import EngineDeadError, EvenerError, OverloadedError, RequestError

#: The body of every error, for the API's description.
ERROR_SCHEMA: Mapping[str, Any] = {
    "type": "object", "required": ["error"],
    "properties": {
        "error": {
            "type": "object", "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"}, "type": {"type": "string"},
                "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]},
            },
        },
    },
}  # fmt: skip
_TYPES = {429: "rate_limit_error"}
_RETRY_SECONDS = 1


@dataclass(eq=False)
class ApiError(Exception):
    """An error as a client sees it.

    Attributes:
        status: HTTP status.
        message: what was asked, what is wrong, what to send instead.
        param: the path of the wrong field (``messages[0].content``).
        code: a short code for programs.
        headers: further headers of the response.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    @property
    def type(self) -> str:
        """OpenAI's error type for ``status``."""
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> bytes:
        """The JSON text; ASCII, so that it can quote whatever a client sent."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, separators=(",", ":")).encode("ascii")

    def response(self, body: bytes | None = None, media_type: str = "application/json") -> Response:
        """The error as an HTTP response; ``body`` in another API's format, default: OpenAI's."""
        return Response(body or self.body(), self.status, dict(self.headers), media_type=media_type)


#: Writes an error's body. An endpoint of another API than OpenAI's sets its own as ``request.state.error_format``, and
#: as ``request.state.error_media_type`` what it is, if it is not JSON.
ErrorFormat: TypeAlias = "Callable[[ApiError], bytes]"

LogFields = dict[str, Any]


def log_fields(scope: Scope) -> LogFields:
    """The fields of the request's log line; callers add theirs."""
    fields: LogFields = scope.setdefault("state", {}).setdefault("log_fields", {})
    return fields


def log_error(scope: Scope, error: ApiError) -> None:
    """Put the reason of an error into the request's log line."""
    log_fields(scope).update(code=error.code, error=error.message)


def internal_error() -> ApiError:
    """The error for an unexpected exception; the log has the exception with the request's id."""
    return ApiError(
        500, "the server failed on this request; its log has the cause under the x-request-id", code="internal_error"
    )


def to_api_error(error: Exception) -> ApiError:
    """``error`` as clients see it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        # Official clients would retry a 504, with the same deadline.
        headers = {"x-should-retry": "false"} if error.status == 504 else {}
        return ApiError(error.status, str(error), error.param, error.code or "invalid_value", headers)
    if isinstance(error, OverloadedError):
        return ApiError(error.status, str(error), code="overloaded", headers={"Retry-After": str(error.retry_after)})
    if isinstance(error, EngineDeadError):
        return unavailable(str(error))
    if isinstance(error, EvenerError):
        return ApiError(500, str(error), code="engine_error")
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {}))
    return internal_error()


def unavailable(message: str) -> ApiError:
    """503: the engine takes no requests now."""
    return ApiError(503, message, code="service_unavailable", headers={"Retry-After": str(_RETRY_SECONDS)})


def deadline_missed() -> ApiError:
    """504: the request's ``max_time`` passed before its first token."""
    message = "max_time passed before the first token; send a larger max_time, or try again under less load"
    # Official clients would retry, with the same deadline.
    return ApiError(504, message, "max_time", "deadline_exceeded", {"x-should-retry": "false"})


def status_error(status: int, message: str) -> ApiError:
    """The error of a request that the engine ended with ``status``."""
    if status == OverloadedError.status:
        return to_api_error(OverloadedError(message))
    return unavailable(message) if status == 503 else ApiError(status, message, code="engine_error")


def error_response(scope: Scope, error: ApiError) -> Response:
    """The error as an HTTP response, in the format of the API that was asked."""
    state = scope.get("state", {})
    error_format: ErrorFormat = state.get("error_format", ApiError.body)
    return error.response(error_format(error), state.get("error_media_type", "application/json"))


async def handle_error(request: Request, error: Exception) -> Response:
    """Exception handler of the application."""
    found = to_api_error(error)
    log_error(request.scope, found)
    return error_response(request.scope, found)


async def handle_unknown_url(request: Request, error: Exception) -> Response:
    """Handler for paths and methods that do not exist."""
    found = to_api_error(error)
    where = f"{request.method} {request.url.path}"
    if found.status == 404:
        found = ApiError(404, f"unknown URL: {where}; GET /openapi.json lists all URLs", code="unknown_url")
    elif found.status == 405:
        allowed = found.headers.get("Allow") or found.headers.get("allow") or ""
        found = ApiError(405, f"{where} is not allowed; allowed: {allowed}", None, "method_not_allowed", found.headers)
    log_error(request.scope, found)
    return found.response()
