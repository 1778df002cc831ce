"""One streamed request over HTTP/1.1, with a cheap client: arriving data is stored with its time, and parsed later.

A client on the same machine takes CPU time from the server that it measures, so nothing is parsed before the answer has
ended. Each request has its own connection, which the server closes.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11

_DONE = "[DONE]"


@dataclass(slots=True)
class Sample:
    """The result of one request. Times are in seconds of ``time.perf_counter``.

    Attributes:
        sent: when its first byte went out.
        times: when each event with text, or each further token, arrived.
        ended: when the last byte arrived.
        prompt_tokens, output_tokens: from the server's ``usage``; without it, one token for each event.
        text: the answer.
        ends: how often the end was told: reasons why choices ended, and errors.
        error: why it failed; empty for a complete answer.
    """

    sent: float
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    ends: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.times[0] - self.sent

    @property
    def e2e(self) -> float:
        """Time to the last token."""
        return self.times[-1] - self.sent

    @property
    def itl(self) -> list[float]:
        """Times between events with text."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Time for each output token after the first; None for an answer of one token."""
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class _Receiver(asyncio.Protocol):
    def __init__(self, request: bytes) -> None:
        self._request = request
        self.sent = 0.0
        self.pieces: list[tuple[float, bytes]] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


async def post(url: str, body: dict[str, Any], headers: dict[str, str] | None = None, timeout: float = 600) -> Sample:
    """Send one request and wait until its answer has ended. Errors are recorded in the sample, not raised."""
    parts = urlsplit(url)
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    request = _request(parts.netloc, parts.path or "/", json.dumps(body).encode(), headers or {})
    began = time.perf_counter()
    receiver = _Receiver(request)
    try:
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: receiver, parts.hostname or "", parts.port or (443 if secure else 80), ssl=secure
        )
        try:
            await asyncio.wait_for(receiver.done, timeout)
        finally:
            transport.close()
    except (OSError, asyncio.TimeoutError) as error:
        return Sample(began, ended=time.perf_counter(), error=f"{type(error).__name__}: {error}")
    return read(receiver.sent, receiver.pieces)


def _request(host: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", "Connection: close",
        f"Content-Length: {len(body)}", *(f"{name}: {value}" for name, value in headers.items()),
    ]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode() + body


def read(sent: float, pieces: list[tuple[float, bytes]]) -> Sample:
    """The sample of a finished answer, from the data and its times."""
    sample = Sample(sent, ended=pieces[-1][0] if pieces else sent)
    finished = False
    if not pieces:
        sample.error = "the server closed the connection without an answer"
        return sample
    try:
        for when, event in _events(pieces):
            if event == _DONE:
                finished = True
                continue
            finished |= _take(sample, when, json.loads(event))
    except (h11.ProtocolError, ValueError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    if not sample.error and not finished:
        sample.error = "the stream ended without an end"
    if not sample.error and not sample.times:
        sample.error = "no token came"
    sample.output_tokens = sample.output_tokens or len(sample.times)
    return sample


def _take(sample: Sample, when: float, event: dict[str, Any]) -> bool:
    """Record one event; True if it ends a choice, after which some servers send no ``[DONE]``."""
    finished = False
    if "error" in event:
        sample.error = json.dumps(event["error"])
        sample.ends += 1
    usage = event.get("usage")
    if usage:
        sample.prompt_tokens, sample.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or choice.get("message") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
        if text:
            sample.text += text
            sample.times.append(when)
        if choice.get("finish_reason") is not None:
            sample.ends += 1
            finished = True
    return finished


def _events(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """The data of each server-sent event, with the time at which it was complete; an answer in one piece is one event.

    Raises:
        ValueError: the answer is an error, or neither of the two; the message says what it is.
    """
    connection = h11.Connection(h11.CLIENT)
    # h11 needs a request before it reads an answer; its content does not change how the answer is read.
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
    connection.send(h11.EndOfMessage())
    rest, status, kind = b"", 0, ""
    for when, piece in [*pieces, (pieces[-1][0], b"")]:
        connection.receive_data(piece)
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.Response):
                status, kind = event.status_code, dict(event.headers).get(b"content-type", b"").decode()
            elif isinstance(event, h11.Data):
                rest += bytes(event.data)
                if status == 200 and kind.startswith("text/event-stream"):
                    *whole, rest = rest.replace(b"\r\n", b"\n").split(b"\n\n")
                    for block in whole:
                        for line in block.split(b"\n"):
                            if line.startswith(b"data:"):
                                yield when, line[5:].strip().decode()
            elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                break
    if status == 200 and kind.startswith("application/json"):
        yield when, rest.decode()
        yield when, _DONE
    elif status != 200 or not kind.startswith("text/event-stream"):
        raise ValueError(f"status {status}, {kind or 'nothing'}: {rest[:300].decode('utf-8', 'replace')}")
