"""Traces of requests: spans that a collector gets by OTLP over HTTP, or over gRPC."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from evener.async_llm import AsyncLLM
from evener.config import from_overrides
from evener.errors import ConfigError
from evener_conformance.fake_engine import FakeEngine
from evener_server import process
from evener_server.app import create_app
from evener_server.options import ServerOptions
from evener_server.request_traces import Traces
from evener_server.trace_places import TracePlaces, trace_places
from evener_server.trace_settings import open_traces

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes spans as an OpenTelemetry collector does; ``hold`` lets requests wait for ``go_on``."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.go_on.wait(60)
                outer.take(ExportTraceServiceRequest.FromString(body))
                outer.paths.append(self.path)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def take(self, message: ExportTraceServiceRequest) -> None:
        for found in message.resource_spans:
            self.resources.append({each.key: each.value.string_value for each in found.resource.attributes})
            for scope in found.scope_spans:
                self.spans += scope.spans

    def close(self) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class GrpcCollector(TraceServiceServicer):  # type: ignore[misc]  # made by grpc's compiler, without types
    """A collector that takes spans by OTLP over gRPC."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []
        self.metadata: list[dict[str, str]] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(1))
        add_TraceServiceServicer_to_server(self, self._server)
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: ExportTraceServiceRequest, context: grpc.ServicerContext) -> ExportTraceServiceResponse:
        self.metadata.append(dict(context.invocation_metadata()))
        Collector.take(self, request)  # type: ignore[arg-type]
        return ExportTraceServiceResponse()

    def close(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


class Traced:
    """An application whose requests are traced."""

    def __init__(self, api: Any, to: str | Traces) -> None:
        self.api = api
        self.traces = Traces.to(TracePlaces(f"{to}/v1/traces"), "0.1.0") if isinstance(to, str) else to
        self.app = create_app(api.llm, traces=self.traces)

    def ask(self, path: str, body: Mapping[str, Any] | None = None, **settings: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                if body is None:
                    return await client.get(path, **settings)
                return await client.post(path, json=body, **settings)

        found: httpx.Response = self.api.run(send())
        return found


def attributes(span: Span) -> dict[str, Any]:
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_what_the_model_did_and_its_queue_prefill_and_decode_below(
    make_api: Any, collector: Collector, stream: bool
) -> None:
    traced = Traced(make_api(), collector.url)
    answer = traced.ask("/v1/chat/completions", {**CHAT, "stream": stream}, headers={"x-request-id": "mine"})
    traced.traces.close()
    assert collector.paths == ["/v1/traces"] and collector.resources[0]["service.name"] == "evener"
    named = {span.name: span for span in collector.spans}
    assert set(named) == {"POST /v1/chat/completions", "chat fake", "queue", "prefill", "decode"}
    request, own = named["POST /v1/chat/completions"], named["chat fake"]
    assert request.kind == Span.SPAN_KIND_SERVER and request.parent_span_id == b""
    assert own.parent_span_id == request.span_id and own.kind == Span.SPAN_KIND_INTERNAL
    parts = [named[name] for name in ("queue", "prefill", "decode")]
    assert {span.parent_span_id for span in parts} == {own.span_id}
    assert len({span.trace_id for span in collector.spans}) == 1
    times = [(span.start_time_unix_nano, span.end_time_unix_nano) for span in parts]
    assert [end for _, end in times[:-1]] == [start for start, _ in times[1:]]
    assert own.start_time_unix_nano <= times[0][0] and times[-1][1] == own.end_time_unix_nano
    assert request.start_time_unix_nano <= own.start_time_unix_nano <= own.end_time_unix_nano
    assert own.end_time_unix_nano <= request.end_time_unix_nano <= time.time_ns()

    found = attributes(request)
    assert found["http.request.method"] == "POST" and found["http.response.status_code"] == 200
    assert found["http.route"] == found["url.path"] == "/v1/chat/completions" and found["evener.request_id"] == "mine"
    found = attributes(own)
    assert (found["gen_ai.operation.name"], found["gen_ai.provider.name"]) == ("chat", "evener")
    assert found["gen_ai.response.finish_reasons"] == ["length"] and found["gen_ai.usage.output_tokens"] == 4
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "fake"
    assert found["gen_ai.latency.time_to_first_token"] > 0
    if not stream:
        assert found["gen_ai.response.id"] == answer.json()["id"]
        assert found["gen_ai.usage.input_tokens"] == answer.json()["usage"]["prompt_tokens"]


def test_no_span_has_the_text_of_a_prompt_or_an_answer(make_api: Any, collector: Collector) -> None:
    traced = Traced(make_api(), collector.url)
    traced.ask("/v1/completions", {"model": "fake", "prompt": "qqqqqqqq", "max_tokens": 4})
    traced.traces.close()
    assert len(collector.spans) == 5 and not any("qqq" in str(span) for span in collector.spans)


def test_a_trace_of_the_client_goes_on_and_its_decision_not_to_record_holds(
    make_api: Any, collector: Collector
) -> None:
    traced = Traced(make_api(), collector.url)
    for flag in ("01", "00"):
        traced.ask("/v1/chat/completions", CHAT, headers={"traceparent": f"00-{TRACE}-{PARENT}-{flag}"})
    traced.ask("/v1/chat/completions", CHAT, headers={"traceparent": f"00-{'0' * 32}-{PARENT}-01"})
    traced.traces.close()
    requests = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert [(span.trace_id.hex() == TRACE, span.parent_span_id.hex()) for span in requests] == [
        (True, PARENT), (False, ""),
    ]  # fmt: skip
    assert len(collector.spans) == 10


def test_the_log_line_names_the_trace(make_api: Any, collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    traced = Traced(make_api(), collector.url)
    with caplog.at_level(logging.INFO, "evener_server.access"):
        traced.ask("/v1/chat/completions", CHAT, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    traced.traces.close()
    assert f"trace_id={TRACE}" in caplog.text


def test_an_error_is_in_the_span_and_an_unknown_url_does_not_name_it(make_api: Any, collector: Collector) -> None:
    traced = Traced(make_api(), collector.url)
    traced.ask("/v1/chat/completions", {**CHAT, "max_tokens": -1})
    traced.ask("/secret/" + "x" * 5000)
    traced.api.engine.die("the worker was killed")
    traced.api.run(traced.api.llm.died.wait())
    traced.ask("/v1/chat/completions", CHAT)
    traced.traces.close()
    wrong, unknown, dead = collector.spans
    assert attributes(wrong)["http.response.status_code"] == 400 and wrong.status.code == Status.STATUS_CODE_UNSET
    assert unknown.name == "GET" and len(attributes(unknown)["url.path"]) == 256
    assert attributes(unknown)["error.type"] == "unknown_url" and "http.route" not in attributes(unknown)
    assert attributes(dead)["http.response.status_code"] == 503 and dead.status.code == Status.STATUS_CODE_ERROR
    assert "the worker was killed" in dead.status.message


def test_a_request_that_its_client_gave_up_has_what_was_done_for_it(make_api: Any, collector: Collector) -> None:
    traced = Traced(make_api(FakeEngine(hold_after=2)), collector.url)

    async def give_up() -> None:
        transport = httpx.ASGITransport(traced.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            work = asyncio.ensure_future(client.post("/v1/chat/completions", json=CHAT))
            while traced.app.state.service.metrics.generation_tokens < 2:
                await asyncio.sleep(0.001)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    traced.api.run(give_up())
    traced.traces.close()
    named = {span.name: attributes(span) for span in collector.spans}
    assert named["POST /v1/chat/completions"]["http.response.status_code"] == 499
    assert named["chat fake"]["gen_ai.usage.output_tokens"] == 2 and "decode" in named


def test_requests_of_monitoring_make_no_spans(make_api: Any, collector: Collector) -> None:
    traced = Traced(make_api(), collector.url)
    for path in ("/health", "/ready", "/metrics"):
        assert traced.ask(path).status_code == 200
    traced.traces.close()
    assert collector.spans == []


def test_a_collector_that_does_not_answer_costs_spans_and_no_request_waits_for_it(
    make_api: Any, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    monkeypatch.setattr("evener_server.request_traces._CLOSE_SECONDS", 0.2)
    collector.go_on.clear()
    traced = Traced(make_api(), collector.url)
    # The exporter's thread waits for the collector all the while; were one of these to wait for it, all would hang.
    for _ in range(20):
        assert traced.ask("/v1/chat/completions", CHAT).status_code == 200
    traced.traces.close()
    assert collector.spans == [] and not collector.go_on.is_set()
    # The process would end now. Here its remaining threads must end before the collector does.
    collector.go_on.set()
    for thread in threading.enumerate():
        if thread.name in ("evener-spans", "OtelBatchSpanRecordProcessor"):
            thread.join(60)
    assert 0 < len(collector.spans) <= 16 + 4  # the queue, and the batch that was on its way


def test_without_an_address_nothing_is_traced_and_its_sdk_is_not_imported() -> None:
    # FastAPI imports OpenTelemetry's API where it is installed.
    program = (
        "import sys; from evener_server import process; from evener_server.app import create_app;"
        "from evener_server.trace_settings import open_traces; assert open_traces(None, '0', {}) is None;"
        "assert not any(name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("environ", "places"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, TracePlaces("http://c:4318/v1/traces")),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/base/"}, TracePlaces("http://c:4318/base/v1/traces")),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://c/spans", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://d"},
         TracePlaces("https://c/spans")),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "otlp,console"},
         TracePlaces("http://c:4318/v1/traces", console=True)),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "console"},
         TracePlaces(None, console=True)),
        ({"OTEL_TRACES_EXPORTER": " console , otlp "}, TracePlaces("http://localhost:4318/v1/traces", console=True)),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
         TracePlaces("http://localhost:4317", "grpc")),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c:4317/", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
         TracePlaces("https://c:4317", "grpc")),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
          "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, TracePlaces("http://c:4317", "grpc")),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None), ({"OTEL_TRACES_EXPORTER": ""}, None),
    ],
)  # fmt: skip
def test_opentelemetrys_variables_turn_traces_on_and_off(environ: dict[str, str], places: TracePlaces | None) -> None:
    assert trace_places(None, environ) == places


@pytest.mark.parametrize(
    ("names", "places", "said"),
    [
        ("otlp,zipkin", TracePlaces("http://c/v1/traces"), "zipkin is not known here and passed over"),
        ("zipkin", None, "zipkin is not known here and passed over"),
        ("none,otlp", None, "none stands alone, so nothing is exported; leave none out"),
    ],
)
def test_an_exporter_that_is_not_known_is_passed_over_with_a_warning(
    names: str, places: TracePlaces | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": names}
    assert trace_places(None, environ) == places and said in caplog.text


def test_the_key_comes_before_the_variables_and_needs_no_path() -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://other:4318", "OTEL_TRACES_EXPORTER": "none"}
    assert trace_places("http://c:4318", environ) == TracePlaces("http://c:4318/v1/traces")
    assert trace_places("http://c:4318/api/otlp", environ) == TracePlaces("http://c:4318/api/otlp")
    assert trace_places("http://c:4318", {"OTEL_SDK_DISABLED": "true"}) is None
    grpc_only = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert trace_places("http://c:4317", grpc_only) == TracePlaces("http://c:4317", "grpc")
    with pytest.raises(ConfigError, match=r"give one such as http://127\.0\.0\.1:4317"):
        trace_places("http://c:4317/v1/traces", grpc_only)


@pytest.mark.parametrize("url", ["c:4318", "grpc://c:4317", "http://", "http://c:port", "http://c/?x=1", ""])
def test_a_wrong_address_is_an_error_that_says_what_to_give(url: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.otlp_endpoint=.*give one such as http://127\.0\.0\.1:4318"):
        trace_places(url, {})


@pytest.mark.parametrize(
    "url", ["http://me:s3cret@c:4318", "http://me:s3cret@c:port", "grpc://me:s3cret@c", "http://me:s3cret@c/?x=1"]
)
def test_an_address_with_a_password_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as caught:
        trace_places(url, {})
    assert "s3cret" not in str(caught.value)


def test_a_protocol_that_is_not_there_is_an_error_that_names_the_others() -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}
    with pytest.raises(ConfigError, match=r"OTLP_TRACES_PROTOCOL=http/protobuf .* or grpc and usually 4317"):
        trace_places(None, environ)


def test_spans_of_a_request_go_to_a_collector_over_grpc(make_api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = GrpcCollector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=mine")
    try:
        traces = open_traces(collector.url, "0.1.0", os.environ)
        assert traces is not None
        traced = Traced(make_api(), traces)
        assert traced.ask("/v1/chat/completions", CHAT).status_code == 200
        traces.close()
    finally:
        collector.close()
    names = {"POST /v1/chat/completions", "chat fake", "queue", "prefill", "decode"}
    assert {span.name for span in collector.spans} == names
    assert collector.resources[0]["service.name"] == "evener"
    assert collector.metadata[0]["authorization"] == "mine"


def test_spans_may_be_printed(make_api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    traces = open_traces(None, "0.1.0", {"OTEL_TRACES_EXPORTER": "console"})
    assert traces is not None
    Traced(make_api(), traces).ask("/v1/chat/completions", CHAT)
    traces.close()
    assert '"name": "chat fake"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "operation"),
    [
        ({"messages": CHAT["messages"], "max_tokens": 2}, "chat"),
        ({"prompt": "hi", "max_tokens": 2}, "text_completion"),
    ],
)
def test_a_request_by_sagemakers_name_is_called_what_it_asks_for(
    make_api: Any, collector: Collector, body: dict[str, Any], operation: str
) -> None:
    traced = Traced(make_api(), collector.url)
    assert traced.ask("/invocations", {"model": "fake", **body}).status_code == 200
    traced.traces.close()
    named = {span.name: attributes(span) for span in collector.spans}
    assert named[f"{operation} fake"]["gen_ai.operation.name"] == operation and "POST /invocations" in named


@pytest.mark.parametrize(
    ("environ", "missing", "extra"),
    [
        ({}, "opentelemetry.sdk.trace", "traces"),
        ({}, "opentelemetry.exporter.otlp.proto.http.trace_exporter", "traces"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
         "traces-grpc"),
    ],
)  # fmt: skip
def test_a_missing_package_is_an_error_with_the_command_that_installs_it(
    environ: dict[str, str], missing: str, extra: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "evener_server.request_traces")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=rf'pip install "evener-server\[{extra}\]"'):
        open_traces("http://c:4318", "0", environ)
    # The environment may be meant for other programs: the server starts.
    assert open_traces(None, "0", {**environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}) is None
    assert "requests are not traced" in caplog.text and f"evener-server[{extra}]" in caplog.text


def test_serve_traces_requests_to_the_address_of_the_key_and_sends_the_last_spans_at_its_end(
    collector: Collector, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "assistant")
    config = from_overrides(str(folder), {"serve.port": 0, "server.otlp_endpoint": collector.url})
    assert ServerOptions.of(config.options).otlp_endpoint == collector.url

    async def ask(run: Any) -> int:
        transport = httpx.ASGITransport(run._server.config.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        return 0

    async def start(config: Any) -> AsyncLLM:
        llm = AsyncLLM(FakeEngine(), model_dir=folder)
        await llm.wait_ready()
        return llm

    monkeypatch.setattr(process._ServerRun, "run", ask)
    assert asyncio.run(process.serve(config, drain_timeout=0, start=start)) == 0
    assert len(collector.spans) == 5 and collector.resources[0]["service.name"] == "assistant"
