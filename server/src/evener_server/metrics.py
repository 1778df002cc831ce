"""``GET /metrics`` for Prometheus, and the figures that the periodic log line says.

Names are those that dashboards of other engines ask for, with ``evener:`` in front. Counting a token costs no lock and
no look-up: everything is counted on the event loop, in plain numbers, and turned into Prometheus' text when somebody
asks. Nothing is global: two applications in one process count apart.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

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

from evener.engine.messages import QUEUE_SECONDS, StatsReport

CONTENT_TYPE = CONTENT_TYPE_LATEST
_LATENCY = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_GAP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 80)
_REASONS = ("stop", "length", "timeout", "abort", "error")


class Histogram:
    """Counts of seconds by upper bound, as Prometheus' histograms."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """``times`` observations of ``seconds`` each."""
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.sum += seconds * times

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self.counts)


class Metrics:
    """What one application has seen.

    Attributes:
        prompt_tokens, generation_tokens: counters.
        finished: samples by finish reason.
        first_token, between_tokens, whole: seconds to a sample's first token, from one token to the next, to its end.
    """

    def __init__(self) -> None:
        self.prompt_tokens = self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.first_token, self.between_tokens, self.whole = Histogram(_LATENCY), Histogram(_GAP), Histogram(_LATENCY)

    def text(self, model: str, report: StatsReport | None, info: dict[str, str]) -> bytes:
        """Prometheus' text.

        Args:
            model: the label ``model_name``.
            report: what the engine says; None when there is none, and then its metrics are left out.
            info: labels of ``evener:build_info``.
        """
        registry = CollectorRegistry()
        registry.register(_Families(self, model, report, info))
        ProcessCollector(registry=registry)
        return generate_latest(registry)


class SampleMeter:
    """Times the samples of one request; made when the request came in."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._started = metrics, time.perf_counter()
        self._last: dict[int, float] = {}

    def tokens(self, choice: int, count: int) -> None:
        """``count`` more tokens of one sample. Those that came together share the time since the one before."""
        now, last = time.perf_counter(), self._last.get(choice)
        self._last[choice] = now
        self._metrics.generation_tokens += count
        if last is not None:
            self._metrics.between_tokens.add((now - last) / count, count)
            return
        self._metrics.first_token.add(now - self._started)
        if count > 1:
            self._metrics.between_tokens.add(0.0, count - 1)

    def end(self, reason: str) -> None:
        """One sample has ended."""
        self._metrics.finished[reason] += 1
        self._metrics.whole.add(time.perf_counter() - self._started)


class _Families(Collector):
    """One look at everything."""

    def __init__(self, metrics: Metrics, model: str, report: StatsReport | None, info: dict[str, str]) -> None:
        self._metrics, self._model, self._report, self._info = metrics, model, report, info

    def collect(self) -> Iterator[Metric]:
        own = self._metrics
        build = InfoMetricFamily("evener:build", "What runs.")
        build.add_metric([], self._info)
        yield build
        yield self._gauge("ready", "1 if requests are taken.", float(self._report is not None))
        yield self._counter("prompt_tokens", "Tokens of prompts.", own.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", own.generation_tokens)
        ended = CounterMetricFamily(
            "evener:request_success", "Samples that ended, by reason.", labels=("model_name", "finished_reason")
        )
        for reason in _REASONS:
            ended.add_metric((self._model, reason), own.finished[reason])
        yield ended
        yield self._histogram("time_to_first_token_seconds", "From a request to its first token.", own.first_token)
        yield self._histogram("inter_token_latency_seconds", "From one token to the next.", own.between_tokens)
        yield self._histogram("e2e_request_latency_seconds", "From a request to its end.", own.whole)
        if self._report is not None:
            yield from self._engine(self._report)

    def _engine(self, report: StatsReport) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Samples that run.", report.running)
        yield self._gauge("num_requests_waiting", "Samples that wait.", report.waiting)
        used = report.blocks_used / report.blocks if report.blocks else 0.0
        yield self._gauge("kv_cache_usage_perc", "Share of the state's blocks that requests hold; 1 is all.", used)
        yield self._gauge("kv_cache_blocks", "Blocks of state.", report.blocks)
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", report.queried_tokens)
        yield self._counter("prefix_cache_hits", "Tokens found in the prefix cache.", report.cached_tokens)
        yield self._counter("forked_tokens", "Tokens whose state samples took over from the first of their prompt.",
                            report.forked_tokens)  # fmt: skip
        yield self._counter("num_preemptions", "Times that a request gave its state back and began anew.",
                            report.preemptions)  # fmt: skip
        yield self._counter("engine_steps", "Steps of the engine.", report.steps)
        yield self._counter("computed_tokens", "Tokens computed, over all steps.", report.computed_tokens)
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
        family = HistogramMetricFamily(f"evener:{name}", text, labels=("model_name",))
        buckets, total = [], 0
        for bound, count in zip((*map(str, map(float, found.bounds)), "+Inf"), found.counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric((self._model,), buckets, found.sum)
        return family
