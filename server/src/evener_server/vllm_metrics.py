"""The same metrics under vLLM's names, so that dashboards made for it show this server.

Names and labels are those of its documentation (docs.vllm.ai, "Production Metrics"). A figure that is only known as a
sum is a summary: ``…_sum`` and ``…_count``, without buckets. Figures that this engine does not have are left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from evener.engine.wire.messages import QUEUE_SECONDS, StatsReport
from evener_server.metrics import FINISH_REASONS, Histogram, Metrics, histogram_family

_LABELS = ("model_name", "engine")


class VllmFamilies(Collector):
    """Collects all metrics once.

    Args:
        model: the label ``model_name``. The label ``engine`` is 0: a server has one engine.
        report: the engine's statistics; None: there is no engine, and its metrics are left out.
        cache: labels of the KV cache, which routers read.
        longest: tokens that a prompt and its answer may have together.
    """

    def __init__(
        self, metrics: Metrics, model: str, report: StatsReport | None, cache: Mapping[str, str] | None = None,
        longest: int = 1,
    ) -> None:  # fmt: skip
        self._metrics, self._values, self._report, self._cache = metrics, (model, "0"), report, dict(cache or {})
        self._longest = longest

    def collect(self) -> Iterator[Metric]:
        own = self._metrics
        yield self._counter("prompt_tokens", "Prompt tokens.", own.prompt_tokens)
        yield self._counter("generation_tokens", "Generated tokens.", own.generation_tokens)
        ended = CounterMetricFamily(
            "vllm:request_success", "Finished samples, by finish reason.", labels=(*_LABELS, "finished_reason")
        )
        for reason in FINISH_REASONS:
            ended.add_metric((*self._values, reason), own.finished[reason])
        yield ended
        for name, text, found in (
            ("time_to_first_token_seconds", "From a request to its first token.", own.time_to_first_token),
            ("inter_token_latency_seconds", "From one token to the next.", own.inter_token_latency),
            # The name before vLLM 0.11.
            ("time_per_output_token_seconds", "From one token to the next.", own.inter_token_latency),
            ("e2e_request_latency_seconds", "From a request to its end.", own.e2e_latency),
            ("request_prefill_time_seconds", "From the engine's queue to a sample's first token.", own.prefill_time),
            ("request_decode_time_seconds", "From a sample's first token to its end.", own.decode_time),
            ("request_inference_time_seconds", "From the engine's queue to a sample's end.", own.inference_time),
            ("request_prompt_tokens", "Tokens of a prompt.", own.request_prompt_tokens),
            ("request_generation_tokens", "Tokens of a sample.", own.request_generation_tokens),
            ("request_max_num_generation_tokens", "Tokens of a request's longest sample.",
             own.request_max_generation_tokens),
            ("request_params_n", "Samples of each prompt that a request asked for.", own.request_n),
            ("request_params_max_tokens", "The maximum of tokens that a request asked for.", own.request_max_tokens),
        ):  # fmt: skip
            yield self._histogram(name, text, found)
        yield self._counter("admission_rejections", "Requests refused: too many were open.", own.rejections)
        if self._report is not None:
            yield from self._engine(self._report)

    def _engine(self, report: StatsReport) -> Iterator[Metric]:
        used = report.blocks_used / report.blocks if report.blocks else 0.0
        yield self._gauge("num_requests_running", "Running samples.", report.running)
        yield self._gauge("num_requests_waiting", "Waiting samples.", report.waiting)
        # A request that was accepted waits for memory or a place in the batch, nothing else.
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Waiting samples, by reason.", labels=(*_LABELS, "reason")
        )
        waiting.add_metric((*self._values, "capacity"), report.waiting)
        yield waiting
        yield self._gauge("kv_cache_usage_perc", "Fraction of KV cache blocks in use; 1 is all.", used)
        # The name before vLLM 0.10.
        yield self._gauge("gpu_cache_usage_perc", "Fraction of KV cache blocks in use; 1 is all.", used)
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", report.queried_tokens)
        yield self._counter("prefix_cache_hits", "Tokens found in the prefix cache.", report.cached_tokens)
        yield self._counter("num_preemptions", "Times that a request gave its state back.", report.preemptions)
        yield self._counter("spec_decode_num_drafts", "Times that tokens were proposed.", report.drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Tokens proposed.", report.drafted_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Proposed tokens that were right.",
                            report.accepted_tokens)  # fmt: skip
        queued = Histogram(QUEUE_SECONDS)
        queued.counts, queued.sum = list(report.queued), report.queued_seconds
        yield self._histogram("request_queue_time_seconds", "From the engine's queue to the first step.", queued)
        preempted = Histogram(range(len(report.preempted) - 1))
        preempted.counts, preempted.sum = list(report.preempted), report.preemptions
        yield self._histogram("request_num_preemptions", "Times that a sample gave its state back.", preempted)
        # vLLM counts the prompt's tokens and the generated ones; of a sample the last generated one is not computed.
        tokens = report.computed_tokens + self._metrics.time_to_first_token.count
        yield self._summary("iteration_tokens_total", "Prompt tokens and generated ones of a step.", report.steps,
                            tokens)  # fmt: skip
        cache = InfoMetricFamily("vllm:cache_config", "The KV cache.", labels=_LABELS)
        cache.add_metric(self._values, {"num_gpu_blocks": str(report.blocks), **self._sizes(report.blocks)})
        yield cache

    def _sizes(self, blocks: int) -> dict[str, str]:
        """What is known of the cache; its size in tokens, and how many requests of the longest length fit into it."""
        if "block_size" not in self._cache:
            return self._cache
        tokens = blocks * int(self._cache["block_size"])
        concurrency = f"{tokens / self._longest:.2f}"
        return {**self._cache, "kv_cache_size_tokens": str(tokens), "kv_cache_max_concurrency": concurrency}

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def _summary(self, name: str, text: str, count: int, total: float) -> Metric:
        family = SummaryMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(self._values, count, total)
        return family

    def _histogram(self, name: str, text: str, found: Histogram) -> Metric:
        return histogram_family(f"vllm:{name}", text, found, _LABELS, self._values)


class AdapterFamily(Collector):
    """``vllm:lora_requests_info``: which adapters a router finds here, as the Gateway API inference extension reads it.

    Args:
        slots: adapters on the device at a time; 0: as many as were named at start.
        loaded: names of the loaded adapters.
    """

    def __init__(self, slots: int, loaded: Iterable[str]) -> None:
        self._loaded = sorted(loaded)
        self._slots = slots or len(self._loaded)

    def collect(self) -> Iterator[Metric]:
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters (LoRA); the value is the time.", labels=labels)
        # Requests do not wait for an adapter to be read: a loaded one is ready, so none is listed as waiting.
        family.add_metric((str(self._slots), ",".join(self._loaded), ""), time.time())
        yield family
