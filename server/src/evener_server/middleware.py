"""Request ids, one log line per request, and the handling of unexpected errors."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Collection

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evener import logs
from evener_server.errors import ApiError, error_response, internal_error, log_error, log_fields

logger = logging.getLogger("evener_server.access")

HEADER = "x-request-id"
#: Fields of the request that had no effect.
IGNORED_HEADER = "x-ignored-fields"
#: A client's id that is safe in a header and a log line; any other is replaced by a new id, which the response has.
_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
#: Monitoring asks for these all the time: they are logged at level debug.
_QUIET = ("/health", "/ready", "/metrics", "/status")
#: So are the files of the page: a browser asks for some dozens at once.
_QUIET_PREFIX = "/page/"
#: nginx's status for a client that disconnected before the response.
CLIENT_GONE = 499
_MAX_SHOWN_CHARS, _MAX_ERROR_CHARS = 64, 300
_PORT = re.compile(r":[0-9]*\Z")


def is_quiet(path: str) -> bool:
    """Whether requests for ``path`` come so often that they are of no interest."""
    return path in _QUIET or path.startswith(_QUIET_PREFIX)


class RequestLog:
    """ASGI middleware around the whole application.

    Every response has ``x-request-id``: the client's own if it has 1 to 128 characters of ``A-Za-z0-9._:/+=@-``, else a
    new one. An unexpected exception is logged and answered with a 500.

    Args:
        responses: counts answers by status; 499: the client was gone before.
    """

    def __init__(self, app: ASGIApp, responses: Counter[int]) -> None:
        self._app, self._responses = app, responses

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
                headers = MutableHeaders(scope=message)
                headers[HEADER] = request_id
                if fields.get("ignored"):
                    headers[IGNORED_HEADER] = fields["ignored"]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            logger.exception("request_id=%s failed", request_id)
            fields["end"] = repr(error)
            if status == 0:
                await error_response(scope, internal_error())(scope, receive, send_with_id)
        finally:
            status = status or CLIENT_GONE
            if not is_quiet(scope["path"]):
                self._responses[status] += 1
            _write(scope, status, time.perf_counter() - started)


class RootPath:
    """ASGI middleware that takes ``root`` from the beginning of paths: a proxy in front of the server may keep it.

    Args:
        root: begins with a slash and ends without one.
    """

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app, self._root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"{self._root}/"):
            scope["path"] = scope["path"][len(self._root) :]
            scope["raw_path"] = scope["path"].encode()
        await self._app(scope, receive, send)


class HostCheck:
    """ASGI middleware that refuses requests whose ``Host`` header is none of ``hosts``: a web page that lets its own
    name point to this machine (DNS rebinding) sends its own name.

    Args:
        hosts: host names without a port; an IPv6 address in brackets.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app, self._hosts = app, {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            if len(given) != 1 or _PORT.sub("", given[0]).lower() not in self._hosts:
                error = ApiError(403, "the Host header names another host; see serve.allowed_hosts", code="wrong_host")
                log_error(scope, error)
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == HEADER.encode():
            text = value.decode("latin-1")
            if _ID.fullmatch(text):
                return str(text)
    return uuid.uuid4().hex


def _write(scope: Scope, status: int, seconds: float) -> None:
    level = logging.DEBUG if is_quiet(scope["path"]) else logging.INFO
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
    shown = {key: _shortened(key, value) for key, value in fields.items() if value is not None}
    text = " ".join(f"{key}={_sanitize(value)}" for key, value in shown.items())
    logger.log(level, text, extra={"fields": shown})


def _shortened(name: str, value: object) -> object:
    """A field as the log has it: clients' text may be as long as their request."""
    if not isinstance(value, str) or _ID.fullmatch(value):
        return value
    longest = _MAX_ERROR_CHARS if name in ("error", "end") else _MAX_SHOWN_CHARS
    return value if len(value) <= longest else value[:longest] + "..."


def _sanitize(value: object) -> str:
    """Clients' text is quoted and escaped, so that it cannot imitate a log line of ours."""
    text = str(value)
    return text if _ID.fullmatch(text) else ascii(text)
