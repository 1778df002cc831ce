"""Arrival times of requests: offsets in seconds from the start."""

from __future__ import annotations

import math
import random


def offsets(count: int, rate: float, *, burst: int = 1, poisson: bool = True, seed: int = 0) -> list[float]:
    """Offsets of ``count`` requests that arrive ``burst`` at a time, ``rate`` a second on average.

    Args:
        rate: requests a second; infinite: all at once.
        poisson: exponential gaps between bursts; otherwise equal ones.

    Raises:
        ValueError: ``rate`` or ``burst`` is not positive.
    """
    if not rate > 0 or burst < 1:
        raise ValueError(f"a rate of {rate:g} requests a second in bursts of {burst} cannot be sent")
    if math.isinf(rate):
        return [0.0] * count
    rng, gap, now = random.Random(seed), burst / rate, 0.0
    found: list[float] = []
    while len(found) < count:
        found += [now] * min(burst, count - len(found))
        now += rng.expovariate(1 / gap) if poisson else gap
    return found
