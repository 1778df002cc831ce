"""``GET /metrics`` for Prometheus, and the numbers of the periodic log line.

Metrics have the names that dashboards of other engines use, with the prefix ``evener:``. Counting a token needs no lock
and no look-up: all counting is done on the event loop in plain numbers, and turned into Prometheus' text format for
each request of the endpoint. Nothing is global: two applications in one process count separately.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from evener.engine.wire.messages import QUEUE_SECONDS, StatsReport

CONTENT_TYPE = CONTENT_TYPE_LATEST
_LATENCY_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
)
_INTER_TOKEN_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    20,
    80,
)
#: Tokens of a request; and samples of it.
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 1_000_000)
_SAMPLE_BUCKETS = (1, 2, 5, 10, 20, 50, 100)
#: Why samples end.
FINISH_REASONS = ("stop", "length", "timeout", "abort", "error")


class Histogram:
    """A histogram of seconds, or of counts, by upper bound, as Prometheus has it."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        """``times`` observations of ``value`` each."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self.counts)


class Metrics:
    """The counters and histograms of one application.

    Attributes:
        prompt_tokens, generation_tokens: counters.
        finished: samples by finish reason.
        responses: answers by HTTP status, those to monitoring and of the page's files left out.
        time_to_first_token, inter_token_latency, e2e_latency: seconds from a request to a sample's first token, from
            one token to the next, and from a request to a sample's end.
        prefill_time, decode_time, inference_time: seconds from the engine's queue to a sample's first token, from there
            to its end, and both.
        rejections: requests that were refused because too many were open.
        request_prompt_tokens, request_generation_tokens: tokens of each prompt, and of each sample.
        request_max_generation_tokens, request_n: tokens of each request's longest sample, and samples of each prompt.
        request_max_tokens: the maximum that each request asked for, where it asked for one.
    """

    def __init__(self) -> None:
        self.prefill_time, self.decode_time, self.inference_time = (Histogram(_LATENCY_BUCKETS) for _ in range(3))
        self.request_prompt_tokens, self.request_generation_tokens = (
            Histogram(_TOKEN_BUCKETS),
            Histogram(_TOKEN_BUCKETS),
        )
        self.request_max_generation_tokens = Histogram(_TOKEN_BUCKETS)
        self.request_max_tokens, self.request_n = Histogram(_TOKEN_BUCKETS), Histogram(_SAMPLE_BUCKETS)
        self.prompt_tokens = self.generation_tokens = self.rejections = 0
        self.finished: Counter[str] = Counter()
        self.responses: Counter[int] = Counter()
        self.time_to_first_token, self.inter_token_latency, self.e2e_latency = (
            Histogram(_LATENCY_BUCKETS),
            Histogram(_INTER_TOKEN_BUCKETS),
            Histogram(_LATENCY_BUCKETS),
        )

    def text(
        self, model: str, report: StatsReport | None, info: dict[str, str], more: Sequence[Collector] = ()
    ) -> bytes:
        """The metrics in Prometheus' text format.

        Args:
            model: the label ``model_name``.
            report: the engine's statistics; None: no engine, its metrics are left out.
            info: labels of ``evener:build_info``.
            more: collectors of further metrics.
        """
        registry = CollectorRegistry()
        registry.register(_Families(self, model, report, info))
        for collector in more:
            registry.register(collector)
        ProcessCollector(registry=registry)
        return generate_latest(registry)


@dataclass(frozen=True)
class Moments:
    """When what happened to a request, as ``time.perf_counter`` has it.

    Attributes:
        began: it was about to be given to the engine; submitted: the engine had all of it.
        started: its first step began; first: the first token came. None: that has not happened.
        ended: it ended, or now.
    """

    began: float
    submitted: float
    started: float | None
    first: float | None
    ended: float


class RequestTimer:
    """Measures the times of one request's samples; created when the request arrives."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._started = metrics, time.perf_counter()
        self._submitted = self._started
        self._waited: float | None = None
        self._ended: float | None = None
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._tokens: Counter[int] = Counter()

    def prompts(self, lengths: Sequence[int], n: int, max_tokens: int | None) -> None:
        """The request was accepted: tokens of its prompts, samples of each, and the maximum that it asked for."""
        own, self._submitted = self._metrics, time.perf_counter()
        own.prompt_tokens += sum(lengths)
        for length in lengths:
            own.request_prompt_tokens.add(length)
        own.request_n.add(n)
        if max_tokens is not None:
            own.request_max_tokens.add(max_tokens)

    def waited(self, queued: float) -> None:
        """A result came of a sample that waited ``queued`` seconds for its first step."""
        self._waited = queued if self._waited is None else min(self._waited, queued)

    def tokens(self, choice: int, count: int, queued: float) -> None:
        """``count`` more tokens of one sample, which waited ``queued`` seconds for its first step. Tokens that come
        together share the time since the previous one."""
        now, last = time.perf_counter(), self._last.get(choice)
        self._last[choice] = now
        self._tokens[choice] += count
        self._metrics.generation_tokens += count
        if last is not None:
            self._metrics.inter_token_latency.add((now - last) / count, count)
            return
        self._first[choice] = now
        self._metrics.time_to_first_token.add(now - self._started)
        self._metrics.prefill_time.add(max(now - self._started - queued, 0.0))
        if count > 1:
            self._metrics.inter_token_latency.add(0.0, count - 1)

    def end(self, choice: int, reason: str, queued: float) -> None:
        """One sample has ended; ``queued`` as in ``tokens``."""
        own, now = self._metrics, time.perf_counter()
        own.finished[reason] += 1
        own.e2e_latency.add(now - self._started)
        own.request_generation_tokens.add(self._tokens[choice])
        if choice in self._first:
            own.decode_time.add(now - self._first[choice])
            own.inference_time.add(max(now - self._started - queued, 0.0))

    def times(self, queued: float) -> dict[str, float]:
        """The times of the request so far, in milliseconds, under vLLM's names; ``queued``: seconds in the queue."""
        first, last = min(self._first.values(), default=None), max(self._last.values(), default=None)
        tokens, found = self._tokens.total(), {"queue_time_ms": queued * 1000}
        if first is None or last is None:
            return found
        found |= {"time_to_first_token_ms": (first - self._started) * 1000, "generation_time_ms": (last - first) * 1000}
        if gaps := tokens - len(self._tokens):
            spent = sum(self._last[choice] - self._first[choice] for choice in self._first)
            found["mean_itl_ms"] = spent / gaps * 1000
        return found | {"tokens_per_second": tokens / (last - self._started)}

    def moments(self) -> Moments:
        """When what happened, of the sample that was first in each."""
        first, ended = min(self._first.values(), default=None), self._ended or time.perf_counter()
        started = None
        if self._waited is not None:
            # What the engine measured, from when it had the request; the first token cannot come before.
            started = min(self._submitted + self._waited, ended if first is None else first)
        return Moments(self._started, self._submitted, started, first, ended)

    def close(self) -> None:
        """All samples have ended."""
        self._ended = time.perf_counter()
        self._metrics.request_max_generation_tokens.add(max(self._tokens.values(), default=0))


#: Counters of ``infer.cpu_layer_num``, ``infer.resident_experts``, ``infer.kv_host_memory``, ``offload.kv_files`` and
#: ``offload.kv_transfer``: only such runs have them.
_OF_HOST_MEMORY = {
    "host_expert_read_bytes": "Bytes of experts that the host read to compute them.",
    "host_expert_microseconds": "Microseconds in which the host computed experts.",
    "host_expert_halved_steps": "Steps that were computed in two halves.",
    "host_expert_captured_steps": "Captured steps that called the host for its experts.",
    "host_expert_passed_bytes": "Bytes of experts that passed through the device in captured steps.",
    "host_expert_streamed_tokens": "Tokens of large steps whose experts were copied to the device, for each layer.",
    "host_expert_streamed_bytes": "Bytes of experts that were copied to the device for large steps.",
    "expert_hits": "Experts that layers needed and that were on the device.",
    "expert_misses": "Experts that layers needed and that were copied to the device first.",
    "expert_copied_bytes": "Bytes of experts that were copied to the device.",
    "expert_host_computed": "Experts that layers needed and that the host computed.",
    "expert_guesses": "Experts that were guessed for the next layer.",
    "expert_guess_hits": "Experts that were guessed for the next layer and that it needed.",
    "expert_wasted_bytes": "Bytes of experts that were copied because of wrong guesses.",
    "expert_exchanges": "Experts that took another one's slot, or its place among passing ones, between steps.",
    "kv_host_hits": "Requests that got KV cache blocks from host memory.",
    "kv_host_hit_tokens": "Tokens whose KV cache came from host memory.",
    "kv_host_stored_bytes": "Bytes of KV cache blocks that were copied to host memory.",
    "kv_host_loaded_bytes": "Bytes of KV cache blocks that were copied from host memory to the device.",
    "kv_files_hits": "Requests that got KV cache blocks from files.",
    "kv_files_hit_tokens": "Tokens whose KV cache came from files.",
    "kv_files_stored_blocks": "KV cache blocks that were written to files.",
    "kv_files_failures": "KV cache blocks that could not be written to files or read from them.",
    "kv_files_skipped_blocks": "KV cache blocks that left too fast to be written to files.",
    "kv_transfer_held": "Requests whose KV cache blocks were held for another server.",
    "kv_transfer_hits": "Requests that got KV cache blocks from another server.",
    "kv_transfer_hit_tokens": "Tokens whose KV cache came from another server.",
    "kv_transfer_failures": "Requests whose prompt was computed because fetching its blocks failed.",
    "kv_transfer_sent_bytes": "Bytes of KV cache blocks that were sent to other servers.",
    "kv_transfer_received_bytes": "Bytes of KV cache blocks that came from other servers.",
}


class _Families(Collector):
    """Collects all metrics once."""

    def __init__(self, metrics: Metrics, model: str, report: StatsReport | None, info: dict[str, str]) -> None:
        self._metrics, self._model, self._report, self._info = metrics, model, report, info

    def collect(self) -> Iterator[Metric]:
        own = self._metrics
        build = InfoMetricFamily("evener:build", "Version, backend and model.")
        build.add_metric([], self._info)
        yield build
        yield self._gauge("ready", "1 if the server accepts requests.", float(self._report is not None))
        yield self._counter("prompt_tokens", "Prompt tokens.", own.prompt_tokens)
        yield self._counter("generation_tokens", "Generated tokens.", own.generation_tokens)
        ended = CounterMetricFamily(
            "evener:request_success", "Finished samples, by finish reason.", labels=("model_name", "finished_reason")
        )
        for reason in FINISH_REASONS:
            ended.add_metric((self._model, reason), own.finished[reason])
        yield ended
        answers = CounterMetricFamily("evener:http_responses", "Answers, by status.", labels=("model_name", "status"))
        for status, count in self._metrics.responses.items():
            answers.add_metric((self._model, str(status)), count)
        yield answers
        yield self._histogram(
            "time_to_first_token_seconds", "From a request to its first token.", own.time_to_first_token
        )
        yield self._histogram("inter_token_latency_seconds", "From one token to the next.", own.inter_token_latency)
        yield self._histogram("e2e_request_latency_seconds", "From a request to its end.", own.e2e_latency)
        if self._report is not None:
            yield from self._engine(self._report)

    def _engine(self, report: StatsReport) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Running samples.", report.running)
        yield self._gauge("num_requests_waiting", "Waiting samples.", report.waiting)
        used = report.blocks_used / report.blocks if report.blocks else 0.0
        yield self._gauge("kv_cache_usage_perc", "Fraction of KV cache blocks in use by requests; 1 is all.", used)
        yield self._gauge("kv_cache_blocks", "KV cache blocks.", report.blocks)
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", report.queried_tokens)
        yield self._counter("prefix_cache_hits", "Tokens found in the prefix cache.", report.cached_tokens)
        yield self._counter("forked_tokens", "Tokens whose state samples and beams took over from another request.",
                            report.forked_tokens)  # fmt: skip
        yield self._counter("num_preemptions", "Times that a request gave its state back and began anew.",
                            report.preemptions)  # fmt: skip
        yield self._counter("draft_tokens", "Tokens proposed by a drafter and checked.", report.drafted_tokens)
        yield self._counter("accepted_draft_tokens", "Proposed tokens that were right.", report.accepted_tokens)
        yield self._counter("engine_steps", "Steps of the engine.", report.steps)
        yield self._counter("computed_tokens", "Tokens computed, over all steps.", report.computed_tokens)
        for name, text in _OF_HOST_MEMORY.items():
            if name in report.counters:
                yield self._counter(name, text, report.counters[name])
        queued = Histogram(QUEUE_SECONDS)
        queued.counts, queued.sum = list(report.queued), report.queued_seconds
        yield self._histogram("request_queue_time_seconds", "From the engine's queue to the first step.", queued)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"evener:{name}", text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"evener:{name}", text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _histogram(self, name: str, text: str, found: Histogram) -> Metric:
        return histogram_family(f"evener:{name}", text, found, ("model_name",), (self._model,))


def histogram_family(
    name: str, text: str, found: Histogram, labels: Sequence[str], values: Sequence[str]
) -> HistogramMetricFamily:
    """A histogram as Prometheus' client takes it: cumulative counts by bound."""
    family = HistogramMetricFamily(name, text, labels=labels)
    buckets, total = [], 0
    for bound, count in zip((*map(str, map(float, found.bounds)), "+Inf"), found.counts, strict=True):
        total += count
        buckets.append((bound, total))
    family.add_metric(values, buckets, found.sum)
    return family
