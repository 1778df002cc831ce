"""``/metrics``, and the periodic log line."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from evener_conformance.fake_engine import FakeEngine
from evener_server.metrics import Histogram
from evener_server.options import ServerOptions
from evener_server.stats_logger import StatsLogger


def values(text: str) -> dict[str, float]:
    """Samples by name and every label but the model's."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def read(api: Any) -> dict[str, float]:
    response = api.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    return values(response.text)


def test_tokens_ends_and_latencies_are_counted_once_for_each_sample(make_api: Any) -> None:
    api = make_api()
    assert api.complete(prompt="abcd", n=2, max_tokens=3).status_code == 200
    assert api.chat(stream=True, max_tokens=5).status_code == 200
    found = read(api)
    assert found["evener:generation_tokens_total"] == 2 * 3 + 5
    usage = api.chat(max_tokens=1).json()["usage"]["prompt_tokens"]
    assert found["evener:prompt_tokens_total"] == 4 + usage
    assert found["evener:request_success_total{finished_reason=length}"] == 3
    assert found["evener:time_to_first_token_seconds_count"] == 3
    assert found["evener:inter_token_latency_seconds_count"] == 2 * 2 + 4
    assert found["evener:e2e_request_latency_seconds_count"] == 3
    assert found["evener:time_to_first_token_seconds_bucket{le=+Inf}"] == 3
    assert 0 < found["evener:time_to_first_token_seconds_sum"] <= found["evener:e2e_request_latency_seconds_sum"]


#: Every series that the queries of vLLM's three dashboards read (examples/observability of its repository).
DASHBOARD_SERIES = (
    "e2e_request_latency_seconds_bucket", "e2e_request_latency_seconds_sum", "e2e_request_latency_seconds_count",
    "time_to_first_token_seconds_bucket", "time_to_first_token_seconds_sum", "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_bucket", "inter_token_latency_seconds_sum", "inter_token_latency_seconds_count",
    "time_per_output_token_seconds_bucket", "prompt_tokens_total", "generation_tokens_total", "num_requests_running",
    "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc", "request_prompt_tokens_bucket",
    "request_prompt_tokens_sum", "request_prompt_tokens_count", "request_generation_tokens_bucket",
    "request_generation_tokens_sum", "request_generation_tokens_count", "request_success_total",
    "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum",
    "request_max_num_generation_tokens_sum", "request_max_num_generation_tokens_count", "request_params_n_sum",
    "request_params_max_tokens_sum", "iteration_tokens_total_sum", "iteration_tokens_total_count",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "cache_config_info",
)  # fmt: skip


def test_vllms_dashboards_find_every_series_with_real_values(make_api: Any) -> None:
    api = make_api()
    assert api.complete(prompt="abcd", n=2, max_tokens=3).status_code == 200
    assert api.chat(max_tokens=5).status_code == 200
    text = api.get("/metrics").text
    names = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    assert [name for name in DASHBOARD_SERIES if f"vllm:{name}" not in names] == []
    found = {name.replace(",engine=0", "").replace("engine=0,", ""): value for name, value in values(text).items()}
    assert found["vllm:generation_tokens_total{engine=0}"] == 2 * 3 + 5
    assert found["vllm:request_success_total{finished_reason=length}"] == 3
    assert found["vllm:request_generation_tokens_sum{engine=0}"] == 2 * 3 + 5
    assert found["vllm:request_max_num_generation_tokens_sum{engine=0}"] == 3 + 5
    assert found["vllm:request_params_n_sum{engine=0}"] == 2 + 1
    assert found["vllm:request_params_max_tokens_sum{engine=0}"] == 3 + 5
    assert found["vllm:request_prompt_tokens_sum{engine=0}"] == found["vllm:prompt_tokens_total{engine=0}"]
    decode, whole = (
        found[f"vllm:{n}_sum{{engine=0}}"] for n in ("request_decode_time_seconds", "e2e_request_latency_seconds")
    )
    assert 0 < decode < whole


def test_parts_of_a_requests_time_are_counted_under_vllms_names(make_api: Any) -> None:
    api = make_api()
    assert api.complete(prompt="abcd", n=2, max_tokens=3).status_code == 200
    found = {name.replace("{engine=0}", ""): value for name, value in read(api).items()}
    names = ("prefill", "decode", "inference")
    seconds = [found[f"vllm:request_{name}_time_seconds_sum"] for name in names]
    assert [found[f"vllm:request_{name}_time_seconds_count"] for name in names] == [2, 2, 2]
    assert min(seconds) > 0 and seconds[0] + seconds[1] == pytest.approx(seconds[2], rel=0.2)
    assert found["vllm:request_inference_time_seconds_sum"] <= found["vllm:e2e_request_latency_seconds_sum"]
    assert found["vllm:num_requests_waiting_by_reason{engine=0,reason=capacity}"] == 0


def test_preemptions_are_counted_for_each_request(make_api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    api, stats = make_api(), FakeEngine._stats
    counts = {"preemptions": 7, "preempted": [2, 1, 0, 0, 1, 0, 0, 0], "steps": 3, "computed_tokens": 8}
    monkeypatch.setattr(FakeEngine, "_stats", lambda self: structs.replace(stats(self), **counts))
    found = {name.replace("engine=0,", ""): value for name, value in read(api).items()}
    assert found["vllm:request_num_preemptions_bucket{le=0.0}"] == 2
    assert found["vllm:request_num_preemptions_bucket{le=+Inf}"] == 4
    assert found["vllm:request_num_preemptions_sum{engine=0}"] == 7
    assert found["vllm:iteration_tokens_total_sum{engine=0}"] == 8


def test_a_refused_request_is_counted(make_api: Any) -> None:
    api = make_api(FakeEngine(info_overrides={"max_reqs": 2}), max_queue=0)
    api.engine.hold()
    client = httpx.AsyncClient(transport=httpx.ASGITransport(api.app), base_url="http://test")

    async def ask() -> str:
        body = {"model": "fake", "prompt": [5], "max_tokens": 1, "n": 2}
        waiting = asyncio.ensure_future(client.post("/v1/completions", json=body))
        while api.llm.num_open < 2:
            await asyncio.sleep(0.001)
        assert (await client.post("/v1/completions", json=body)).status_code == 429
        api.engine.release()
        assert (await waiting).status_code == 200
        return (await client.get("/metrics")).text

    counted = "vllm:admission_rejections_total{engine=0}"
    assert read(api)[counted] == 0
    assert values(api.run(asyncio.wait_for(ask(), 60)))[counted] == 1
    api.run(client.aclose())


def test_vllms_names_can_be_left_out(make_api: Any) -> None:
    api = make_api()
    api.app.state.service.options = ServerOptions(vllm_metrics=False)
    assert "vllm:" not in api.get("/metrics").text
    assert ServerOptions.of({"server": {"vllm_metrics": False}}) == ServerOptions(vllm_metrics=False)
    assert ServerOptions.of({}) == ServerOptions()


def test_gauges_are_the_engines_report(make_api: Any) -> None:
    api = make_api()
    found = read(api)
    assert found["evener:num_requests_running"] == found["evener:num_requests_waiting"] == 0
    assert found["evener:kv_cache_blocks"] == 100 and found["evener:kv_cache_usage_perc"] == 0
    assert found["evener:request_queue_time_seconds_count"] == 0 and found["evener:num_preemptions_total"] == 0
    assert found["evener:ready"] == 1
    assert found["evener:draft_tokens_total"] == found["vllm:spec_decode_num_accepted_tokens_total{engine=0}"] == 0


def test_experts_that_were_copied_are_counted_in_runs_that_copy_them(
    make_api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("expert_hits", "expert_misses", "expert_copied_bytes", "expert_guesses", "expert_guess_hits",
             "expert_wasted_bytes", "expert_host_computed")  # fmt: skip
    api = make_api()
    assert not any(f"evener:{name}_total" in read(api) for name in names)
    report, counters = FakeEngine._stats, dict(zip(names, (7, 3, 4096, 8, 6, 2048, 2), strict=True))
    monkeypatch.setattr(FakeEngine, "_stats", lambda engine: structs.replace(report(engine), counters=counters))
    found = read(api)
    assert [found[f"evener:{name}_total"] for name in names] == [7, 3, 4096, 8, 6, 2048, 2]


def test_experts_that_the_host_computes_are_counted_in_such_runs(
    make_api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("host_expert_read_bytes", "host_expert_microseconds", "host_expert_halved_steps",
             "host_expert_captured_steps", "host_expert_passed_bytes", "host_expert_streamed_tokens",
             "host_expert_streamed_bytes")  # fmt: skip
    api = make_api()
    assert not any(f"evener:{name}_total" in read(api) for name in names)
    report, counters = FakeEngine._stats, dict(zip(names, (4096, 70, 5, 9, 512, 96, 2048), strict=True))
    monkeypatch.setattr(FakeEngine, "_stats", lambda engine: structs.replace(report(engine), counters=counters))
    found = read(api)
    assert [found[f"evener:{name}_total"] for name in names] == [4096, 70, 5, 9, 512, 96, 2048]


def test_state_in_host_memory_is_counted_in_runs_that_have_some(make_api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("kv_host_hits", "kv_host_hit_tokens", "kv_host_stored_bytes", "kv_host_loaded_bytes")
    api = make_api()
    assert not any(f"evener:{name}_total" in read(api) for name in names)
    report, counters = FakeEngine._stats, dict(zip(names, (2, 96, 8192, 4096), strict=True))
    monkeypatch.setattr(FakeEngine, "_stats", lambda engine: structs.replace(report(engine), counters=counters))
    found = read(api)
    assert [found[f"evener:{name}_total"] for name in names] == [2, 96, 8192, 4096]


def test_every_metric_is_labelled_with_the_models_name(make_api: Any) -> None:
    api = make_api(FakeEngine(info_overrides={"served_name": 'a "name"\n'}))
    families = text_string_to_metric_families(api.get("/metrics").text)
    samples = [s for family in families for s in family.samples if s.name.startswith("evener:")]
    labelled = [s for s in samples if s.name != "evener:build_info"]
    assert labelled and all(sample.labels["model_name"] == 'a "name"\n' for sample in labelled)


def test_a_failed_and_an_aborted_request_are_counted_as_such(
    make_server: Any, eventually: Any, http: httpx.Client
) -> None:
    server = make_server(FakeEngine(hold_after=2))
    body = {"model": "fake", "prompt": "hello", "max_tokens": 9, "stream": True}
    with http.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        # Both are here: what the engine has made may not have reached the server when its client goes.
        events = (json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line)
        text = ""
        while len(text) < 2:
            text += next(events)["choices"][0]["text"]
    eventually(server.idle)
    found = values(http.get(f"{server.url}/metrics").text)
    assert found["evener:request_success_total{finished_reason=abort}"] == 1
    assert found["evener:request_success_total{finished_reason=length}"] == 0
    assert found["evener:generation_tokens_total"] == 2


def test_it_answers_while_there_is_no_engine(make_api: Any) -> None:
    api = make_api(FakeEngine(auto_ready=False), wait=False)
    found = read(api)
    assert found["evener:ready"] == 0 and "evener:num_requests_running" not in found
    assert found["evener:generation_tokens_total"] == 0


def test_two_applications_in_one_process_have_separate_metrics(make_api: Any) -> None:
    first, second = make_api(), make_api()
    first.complete(max_tokens=2)
    assert read(first)["evener:generation_tokens_total"] == 2
    assert read(second)["evener:generation_tokens_total"] == 0


def test_a_histogram_counts_a_bound_in_the_bucket_that_it_ends() -> None:
    found = Histogram((1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5, 9.0):
        found.add(seconds)
    found.add(2.0, times=3)
    assert found.counts == [2, 4, 1] and found.count == 7 and found.sum == pytest.approx(18.0)


def test_the_log_line_says_what_happened_and_nothing_when_nothing_did(make_api: Any) -> None:
    api = make_api()
    stats_logger, now = StatsLogger(api.app.state.service), time.monotonic()
    report = api.run(api.llm.stats())
    assert stats_logger.line(report, now + 10) is None
    api.complete(prompt="hello", max_tokens=20)
    line = stats_logger.line(api.run(api.llm.stats()), now + 20)
    assert line is not None
    for part in ("running 0, waiting 0", "prompt 0.5 tokens/s", "generation 2.0 tokens/s", "ended 1", "first token"):
        assert part in line
    assert stats_logger.line(api.run(api.llm.stats()), now + 30) is None


def test_the_log_line_comes_by_itself(make_api: Any, caplog: pytest.LogCaptureFixture) -> None:
    import asyncio

    api = make_api()
    stats_logger = StatsLogger(api.app.state.service)
    api.complete(max_tokens=2)

    async def wait() -> None:
        task = asyncio.ensure_future(stats_logger.run(0.001))
        while not any(record.name == "evener_server.stats_logger" for record in caplog.records):
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with caplog.at_level("INFO", "evener_server.stats_logger"):
        api.run(asyncio.wait_for(wait(), 120))


def test_answers_are_counted_by_status_without_those_to_monitoring(make_api: Any) -> None:
    api = make_api()
    api.complete()
    api.complete(max_tokens=-1)
    api.get("/v1/nothing")
    api.get("/health")
    found = read(api)
    names = {name: value for name, value in found.items() if name.startswith("evener:http_responses_total")}
    assert names == {f"evener:http_responses_total{{status={status}}}": 1 for status in (200, 400, 404)}
