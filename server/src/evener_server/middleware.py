"""Request ids, one log line a request, and the last resort for errors."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evener import logs
from evener_server.errors import internal_error

logger = logging.getLogger("evener_server.access")

HEADER = "x-request-id"
#: What may stand in a header and a log line as it is; any other id is replaced by one of ours, which the header tells.
_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
#: Asked for all the time by whatever watches the server.
_QUIET = ("/health", "/ready", "/metrics")
#: nginx's number for a client that went away before it was answered.
_CLIENT_GONE = 499
_SHOWN = 64

LogFields = dict[str, Any]


def log_fields(scope: Scope) -> LogFields:
    """What the request's log line will say; add to it."""
    fields: LogFields = scope.setdefault("state", {}).setdefault("log_fields", {})
    return fields


class RequestLog:
    """ASGI middleware around everything.

    Every response has ``x-request-id``: the client's own if it is 1 to 128 of ``A-Za-z0-9._:/+=@-``, else a new one. An
    exception that nothing else handles is logged and answered with a 500.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        fields = log_fields(scope)
        fields["request_id"] = request_id
        logs.request_id.set(request_id)
        started, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            logger.exception("request_id=%s failed", request_id)
            fields["end"] = repr(error)
            if status == 0:
                await internal_error().response()(scope, receive, send_with_id)
        finally:
            _write(scope, status or _CLIENT_GONE, time.perf_counter() - started)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == HEADER.encode():
            text = value.decode("latin-1")
            if _ID.fullmatch(text):
                return str(text)
    return uuid.uuid4().hex


def _write(scope: Scope, status: int, seconds: float) -> None:
    level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
    if not logger.isEnabledFor(level):
        return
    fields = {
        "request_id": None,
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "ms": round(seconds * 1000),
        **log_fields(scope),
    }
    text = " ".join(f"{key}={_shown(value)}" for key, value in fields.items() if value is not None)
    logger.log(level, text, extra={"fields": fields})


def _shown(value: object) -> str:
    """Clients' text is quoted, escaped and cut, so that nothing of it can look like a line of ours."""
    text = str(value)
    if _ID.fullmatch(text):
        return text
    return ascii(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
