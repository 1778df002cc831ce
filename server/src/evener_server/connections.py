"""Connections: limits on their number, on a request's header and on the time that it takes to arrive."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from evener_server.errors import ApiError

logger = logging.getLogger(__name__)

#: Descriptors that the process needs besides those of connections.
_RESERVED_DESCRIPTORS = 128
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def max_connections(wanted: int) -> int:
    """``wanted`` connections, or as many as the process has descriptors for."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - _RESERVED_DESCRIPTORS))


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol with limits. A connection that passes one gets a 408, 431 or 503, and is closed."""

    #: Bytes of a request line and its headers.
    header_bytes: ClassVar[int] = 64 << 10
    #: Seconds for them to arrive, from the first byte or the connection on.
    header_timeout: ClassVar[float] = 20.0
    connection_limit: ClassVar[int] = 4096

    _header_size, _last = 0, b""
    _in_header = True
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_header()
        if len(self.connections) > self.connection_limit:
            self._refuse(503, f"the server has {self.connection_limit} connections, its limit; try again later")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        seen, self._last = self._last + data, data[-3:]
        if self._in_header:
            if self._header_timer is None:
                self._await_header()
            # Counted before it is parsed; what begins in the middle of a read is counted from the next one on.
            end = seen.find(b"\r\n\r\n")
            self._header_size += len(data) if end < 0 else end + 4 - (len(seen) - len(data))
            if self._header_size > self.header_bytes:
                self._refuse(431, f"the request's header is larger than {self.header_bytes} bytes")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._header_timer is None:
            self._await_header()

    def on_headers_complete(self) -> None:
        self._in_header = False
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_header, self._header_size = True, 0

    def _await_header(self) -> None:
        self._header_timer = self.loop.call_later(self.header_timeout, self._header_timed_out)

    def _header_timed_out(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_header()  # the next request comes while this one is answered
        elif not self.transport.is_closing():
            self._refuse(408, f"the request's header did not arrive within {self.header_timeout:g} seconds")

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, status: int, message: str) -> None:
        body = ApiError(status, message, code="connection_limit" if status == 503 else "header_limit").body()
        head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        head += "retry-after: 1\r\n" if status == 503 else ""
        self._stop_timer()
        if self.cycle is None or self.cycle.response_complete:  # otherwise it would end up inside another response
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


class Listener(socket.socket):
    """A listening socket that lets the event loop pause when no descriptor is free.

    asyncio calls ``accept`` in a loop and does not leave it after such an error: it would log it for each call.
    """

    _failed = False

    def accept(self) -> tuple[socket.socket, Any]:
        if self._failed:
            self._failed = False
            raise BlockingIOError
        try:
            return super().accept()
        except OSError as error:
            self._failed = error.errno in _NO_RESOURCES
            raise


class AcceptErrors:
    """An event loop's exception handler: one line for a time without free descriptors, instead of a trace a second."""

    def __init__(self, interval: float = 60.0) -> None:
        self._interval, self._quiet_until = interval, float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _NO_RESOURCES and "accept" in context["message"]):
            loop.default_exception_handler(context)
        elif loop.time() >= self._quiet_until:
            self._quiet_until = loop.time() + self._interval
            logger.warning("no connection is accepted for now: %s; raise the limit with ulimit -n", error.strerror)
