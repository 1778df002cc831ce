"""Spans of requests for OpenTelemetry.

A request is one span of kind server, named by method and route, with the attributes of OpenTelemetry's conventions for
HTTP. What the model did for it is a span below, as the conventions for generative AI name it (``chat MODEL``), with
vLLM's names of latencies. Below that are ``queue``, ``prefill`` and ``decode``. Spans are made when the request has
ended, from times that are measured anyway. They have no text of prompts or answers.

Spans go through a queue of limited size to a thread that sends them: a slow or unreachable collector costs spans, not
time. OpenTelemetry's variables set its size (``OTEL_BSP_*``), the sampler, headers, and the names of the service.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from threading import Thread
from typing import TypeAlias

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evener_server.errors import log_fields
from evener_server.generation import Generation
from evener_server.middleware import CLIENT_GONE, is_quiet
from evener_server.trace_places import TracePlaces

Attributes: TypeAlias = "dict[str, str | int | float | Sequence[str]]"

#: Characters of an attribute: clients choose paths and names.
_MAX_CHARACTERS = 256
#: Seconds that the end of the server waits for spans to be sent.
_CLOSE_SECONDS = 5.0
#: What a request asks for, by its route, or by the route that does the same; all others are chats.
_OPERATIONS = {
    "/v1/completions": "text_completion", "/generate": "text_completion", "/forward": "forward",
    "/v1/embeddings": "embeddings", "/rerank": "rerank", "/v1/rerank": "rerank", "/v2/rerank": "rerank",
    "/score": "score", "/v1/score": "score",
}  # fmt: skip


class Traces:
    """Makes the spans of requests.

    Args:
        exporters: take finished spans, each in a thread of its own.
        version: of this package.
    """

    def __init__(self, exporters: Sequence[SpanExporter], version: str) -> None:
        own = Resource.create({"service.name": "evener", "service.version": version})
        # What the environment says of the service comes over our own.
        self._provider = TracerProvider(
            resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False,
            span_limits=SpanLimits(max_span_attribute_length=_MAX_CHARACTERS),
        )  # fmt: skip
        for exporter in exporters:
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("evener_server", version)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, places: TracePlaces, version: str) -> Traces:
        """Spans go to these places.

        Raises:
            ModuleNotFoundError: the package for their protocol is missing.
        """
        exporters: list[SpanExporter] = []
        # Imported only if it is used: each comes with an extra of its own.
        if places.url is not None and places.protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

            exporters.append(OverGrpc(endpoint=places.url))
        elif places.url is not None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

            exporters.append(OverHttp(endpoint=places.url))
        if places.console:
            exporters.append(ConsoleSpanExporter(out=sys.stdout))
        return cls(exporters, version)

    def begin(self, scope: Scope, now: int) -> Span:
        """The span of a request that arrives at ``now``, in nanoseconds since 1970. It continues the trace that the
        request's header ``traceparent`` names."""
        carrier: dict[str, str] = {}
        for name, value in scope["headers"]:
            if name in (b"traceparent", b"tracestate"):
                key, text = name.decode(), value.decode("latin-1")
                carrier[key] = f"{carrier[key]},{text}" if key in carrier else text
        return self._tracer.start_span(
            scope["method"], self._propagator.extract(carrier, Context()), SpanKind.SERVER, start_time=now
        )

    def child(self, parent: Span, name: str, start: int, end: int, attributes: Attributes | None = None) -> Span:
        """A span below ``parent``, from ``start`` to ``end``, in nanoseconds since 1970."""
        context = set_span_in_context(parent, Context())
        span = self._tracer.start_span(name, context, SpanKind.INTERNAL, attributes, start_time=start)
        span.end(max(start, end))
        return span

    def close(self) -> None:
        """Send what is left, for some seconds; then it is dropped."""
        # Not in this thread: a collector that does not answer must not hold up the end of the process.
        closing = Thread(target=self._provider.shutdown, name="evener-spans", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


class RequestTraces:
    """ASGI middleware that makes the spans of each request but those of monitoring. The request's log line gets the
    field ``trace_id``.

    Args:
        model_of: the model or adapter that answers a request which names this one.
    """

    def __init__(self, app: ASGIApp, traces: Traces, model_of: Callable[[str | None], str]) -> None:
        self._app, self._traces, self._model_of = app, traces, model_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_quiet(scope["path"]):
            await self._app(scope, receive, send)
            return
        clock, status = _Clock(), 0
        span = self._traces.begin(scope, clock.start)
        log_fields(scope)["trace_id"] = f"{span.get_span_context().trace_id:032x}"

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception:
            status = status or 500  # as ``RequestLog`` answers it
            raise
        finally:
            if span.is_recording():
                _describe(span, scope, status or CLIENT_GONE)
                generation: Generation | None = scope.get("state", {}).get("generation")
                if generation is not None:
                    self._describe_generation(span, scope, generation, clock)
            span.end(clock.now())

    def _describe_generation(self, span: Span, scope: Scope, generation: Generation, clock: _Clock) -> None:
        moments = generation.moments()
        asked, end = log_fields(scope).get("model"), moments.ended
        route = scope["state"].get("acts_as") or _route(scope)
        operation, model = _OPERATIONS.get(route, "chat"), self._model_of(asked)
        attributes = _attributes(generation) | {
            "gen_ai.operation.name": operation, "gen_ai.request.model": asked or model, "gen_ai.response.model": model,
        }  # fmt: skip
        own = self._traces.child(span, f"{operation} {model}", clock.at(moments.began), clock.at(end), attributes)
        if moments.started is None:
            return
        places = [("queue", moments.submitted, moments.started), ("prefill", moments.started, moments.first or end)]
        if moments.first is not None:
            places.append(("decode", moments.first, end))
        for name, start, stop in places:
            self._traces.child(own, name, clock.at(start), clock.at(stop))


class _Clock:
    """Turns the times of ``time.perf_counter`` into nanoseconds since 1970: the system's clock may be set meanwhile.

    Attributes:
        start: when this was made.
    """

    def __init__(self) -> None:
        self.start, self._began = time.time_ns(), time.perf_counter()

    def at(self, moment: float) -> int:
        return self.start + max(0, round((moment - self._began) * 1e9))

    def now(self) -> int:
        return self.at(time.perf_counter())


def _route(scope: Scope) -> str:
    """The path as the application has it, with names in place of what clients put there; "": an unknown URL."""
    return str(getattr(scope.get("route"), "path", ""))


def _describe(span: Span, scope: Scope, status: int) -> None:
    fields, route = log_fields(scope), _route(scope)
    span.update_name(f"{scope['method']} {route}".rstrip())
    found: Mapping[str, str | int | None] = {
        "http.request.method": scope["method"], "url.path": scope["path"], "url.scheme": scope.get("scheme"),
        "http.route": route or None, "http.response.status_code": status, "evener.request_id": fields.get("request_id"),
        "evener.api_key": fields.get("key"),
        # As OpenTelemetry asks: a code where there is one.
        "error.type": (fields.get("code") or str(status)) if status >= 400 else None,
    }  # fmt: skip
    span.set_attributes({name: value for name, value in found.items() if value is not None})
    failed = fields.get("end")
    if status >= 500 or (failed is not None and status != CLIENT_GONE):
        span.set_status(Status(StatusCode.ERROR, str(fields.get("error") or failed or "")[:_MAX_CHARACTERS]))


def _attributes(generation: Generation) -> Attributes:
    """By the conventions for generative AI; times, in seconds, under vLLM's names."""
    usage, times = generation.usage(), generation.times()
    found: Attributes = {
        "gen_ai.provider.name": "evener", "gen_ai.response.id": generation.streams[0].request_id,
        "gen_ai.request.choice.count": generation.n,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"], "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": generation.cached_tokens,
        "gen_ai.response.finish_reasons": [reason for _, reason in sorted(generation.finish_reasons.items())],
        "gen_ai.latency.time_in_queue": times["queue_time_ms"] / 1000,
    }  # fmt: skip
    if (first := times.get("time_to_first_token_ms")) is not None:
        found["gen_ai.latency.time_to_first_token"] = first / 1000
        found["gen_ai.latency.time_in_model_decode"] = times["generation_time_ms"] / 1000
    return found
