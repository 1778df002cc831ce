"""A generation as an HTTP response: whole, or as server-sent events.

Nothing is sent before the first token, so that an error before it can have its own HTTP status. If the client
disconnects, the generation is aborted, streamed or not.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from evener.errors import EvenerError
from evener_server.errors import ApiError, LogFields, log_fields, to_api_error
from evener_server.generation import Generation

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encode = msgspec.json.Encoder().encode


def to_json(value: Any) -> bytes:
    """JSON text in UTF-8."""
    return _encode(value)


def event(body: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + body + b"\n\n"


def named_event(value: Mapping[str, Any]) -> bytes:
    """One server-sent event that is named by its field ``type``."""
    return b"event: " + str(value["type"]).encode() + b"\n" + event(to_json(value))


class ChunkEnd:
    """The end of each chunk of a stream, after its list of choices: with ``include_usage`` the usage, which is null, or
    with ``continuous_usage`` the usage so far."""

    def __init__(self, generation: Generation, include_usage: bool, continuous: bool) -> None:
        self._generation = generation if continuous else None
        self._same = (b',"usage":null' if include_usage else b"") + b"}\n\n"

    def __call__(self, *, before_tokens: bool = False) -> bytes:
        """The bytes for a chunk that is sent now. ``before_tokens``: it has none and comes before all that have."""
        if self._generation is None:
            return self._same
        usage = self._generation.usage()
        if before_tokens:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return b',"usage":' + to_json(usage) + b"}\n\n"


class Job(ABC):
    """One API request, checked and ready to run.

    Attributes:
        stream: whether the response is sent as server-sent events.
        without_effect: fields of the request that change nothing, besides those that its body names.
        media_type, headers: of a response that is not streamed; stream_headers: of a stream.
    """

    stream: bool
    media_type: str = "application/json"
    headers: Mapping[str, str] = {}
    stream_headers: Sequence[tuple[bytes, bytes]] = _SSE_HEADERS
    without_effect: Sequence[str] = ()

    def error_event(self, error: ApiError) -> bytes:
        """The last event of a stream that fails after it began (optional; default: OpenAI's of chat completions)."""
        return event(error.body())

    @abstractmethod
    async def start(self) -> Generation:
        """Submit the request.

        Raises:
            RequestError, OverloadedError, EngineDeadError: as ``AsyncLLM.submit``.
        """

    @abstractmethod
    def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The body of a stream, its last event included; the first piece comes with the first token.

        Raises:
            ApiError: the engine ended the request.
        """

    @abstractmethod
    async def full_response(self, generation: Generation) -> bytes:
        """The whole body of a response that is not streamed.

        Raises:
            ApiError: the engine ended the request.
        """


class GenerationResponse(Response):
    """Runs a job while its response is sent."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = log_fields(scope)
        if self._job.without_effect:
            # After those of the body.
            named = [fields["ignored"]] if fields.get("ignored") else []
            fields["ignored"] = ", ".join([*named, *self._job.without_effect])
        work = asyncio.ensure_future(self._answer(scope, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                fields["end"] = "disconnected"
        finally:
            finished = work.done()
            for task in (work, gone):
                task.cancel()
            result, _ = await asyncio.gather(work, gone, return_exceptions=True)
            if isinstance(result, Exception) and not finished:
                logger.error("request_id=%s failed while it was aborted", fields.get("request_id"), exc_info=result)
        if finished:
            work.result()

    async def _answer(self, scope: Scope, send: Send) -> None:
        fields = log_fields(scope)
        async with await self._job.start() as generation:
            scope["state"]["generation"] = generation
            fields["id"] = generation.streams[0].request_id
            try:
                if self._job.stream:
                    await self._send_events(generation, send, fields)
                else:
                    body = await self._job.full_response(generation)
                    answer = Response(body, headers=self._job.headers, media_type=self._job.media_type)
                    await answer({"type": "http"}, _no_receive, send)
            finally:
                fields["prompt_tokens"] = generation.prompt_tokens
                fields["completion_tokens"] = generation.completion_tokens
                fields["finish"] = ",".join(sorted(set(generation.finish_reasons.values()))) or None
                fields.update(_milliseconds(generation.times()))

    async def _send_events(self, generation: Generation, send: Send, fields: LogFields) -> None:
        async with aclosing(self._job.events(generation)) as events:  # type: ignore[type-var]
            piece = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self._job.stream_headers})
            try:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                async for piece in events:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except (ApiError, EvenerError) as error:
                fields["end"] = str(error)
                await send(
                    {
                        "type": "http.response.body",
                        "body": self._job.error_event(to_api_error(error)),
                        "more_body": True,
                    }
                )
            except Exception as error:
                # The status was already sent: the client gets the error in the stream, the log the stack trace.
                logger.exception("request_id=%s the stream failed", fields.get("request_id"))
                fields["end"] = repr(error)
                await send(
                    {
                        "type": "http.response.body",
                        "body": self._job.error_event(to_api_error(error)),
                        "more_body": True,
                    }
                )
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _milliseconds(times: Mapping[str, float]) -> dict[str, int]:
    """The times of a request as its log line has them."""
    names = {"queue_time_ms": "queue_ms", "time_to_first_token_ms": "first_token_ms", "generation_time_ms": "tokens_ms"}
    return {short: round(times[name]) for name, short in names.items() if name in times}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _no_receive() -> Any:
    raise AssertionError("a response in one piece reads nothing")
