"""Arithmetic of a serving run: percentiles, rates, goodput."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stream_client import Sample

METRICS = ("ttft", "tpot", "itl", "e2el")
"""Time to first token; mean time for each later token of an answer; time between events; end-to-end latency."""


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest ranks, as in numpy.

    Raises:
        ValueError: there are no values, or ``percent`` is outside 0 to 100.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent:g} of {len(values)} values does not exist")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)


def standard_deviation(values: Sequence[float]) -> float:
    """Standard deviation of all values, as in numpy."""
    middle = mean(values)
    return math.sqrt(mean([(value - middle) ** 2 for value in values]))


def metric(name: str, samples: Iterable[Sample]) -> list[float]:
    """The values of a metric over successful samples, in seconds."""
    good = [sample for sample in samples if not sample.error]
    if name == "ttft":
        return [sample.ttft for sample in good]
    if name == "e2el":
        return [sample.e2e for sample in good]
    if name == "itl":
        return [value for sample in good for value in sample.itl]
    return [value for sample in good if (value := sample.tpot) is not None]


@dataclass(frozen=True)
class ServiceLevel:
    """Limits for a good request, ``{metric: seconds}``; for ``itl`` the mean counts."""

    limits: dict[str, float]

    def met(self, sample: Sample) -> bool:
        """Whether ``sample`` succeeded and is within every limit."""
        if sample.error:
            return False
        for name, limit in self.limits.items():
            values = metric(name, [sample])
            if values and mean(values) > limit:
                return False
        return True


def summary(
    samples: Sequence[Sample], seconds: float, percents: Sequence[float], goal: ServiceLevel | None = None
) -> dict[str, Any]:
    """One row: counts, rates, and for each metric mean, median, standard deviation and percentiles in milliseconds.

    Args:
        seconds: from the first byte sent to the last received.
    """
    good = [sample for sample in samples if not sample.error]
    prompt, output = sum(s.prompt_tokens for s in good), sum(s.output_tokens for s in good)
    row: dict[str, Any] = {
        "requests": len(samples),
        "completed": len(good),
        "failed": len(samples) - len(good),
        "duration_s": round(seconds, 4),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": round(len(good) / seconds, 4),
        "output_throughput": round(output / seconds, 2),
        "total_token_throughput": round((prompt + output) / seconds, 2),
        "decode_throughput": _decode_rate(good),
    }
    if goal is not None:
        row["goodput"] = round(sum(map(goal.met, samples)) / seconds, 4)
    for name in METRICS:
        values = metric(name, good)
        if not values:
            continue
        row[f"mean_{name}_ms"] = _ms(mean(values))
        row[f"median_{name}_ms"] = _ms(percentile(values, 50))
        row[f"std_{name}_ms"] = _ms(standard_deviation(values))
        for percent in percents:
            row[f"p{percent:g}_{name}_ms"] = _ms(percentile(values, percent))
    return row


def _decode_rate(good: Sequence[Sample]) -> float | None:
    """Output tokens per second after the first tokens, over the time in which any answer was running."""
    if not good:
        return None
    later = sum(max(0, s.output_tokens - 1) for s in good)
    seconds = max(s.times[-1] for s in good) - min(s.times[0] for s in good)
    return round(later / seconds, 2) if later and seconds > 0 else None


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
