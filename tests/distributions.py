"""The exact distribution of sampled tokens, by hand, and whether draws have it."""

from __future__ import annotations

import math
from typing import Any

import torch

DRAWS, VOCABULARY = 100_000, 12
LOGITS = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(11)) * 1.5
#: Each filter, and all of them.
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 99},
    {"top_p": 0.7},
    {"top_p": 0.01},
    {"min_p": 0.15},
    {"temperature": 1.4, "top_k": 8, "top_p": 0.85, "min_p": 0.1},
]


def exact(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, logits: list[float] | None = None
) -> list[float]:
    """The distribution by hand, one token after another."""
    weights = [math.exp(v / temperature) for v in logits or LOGITS.tolist()]
    order = sorted(range(VOCABULARY), key=lambda i: -weights[i])
    kept = order[:top_k] if top_k else order
    total = sum(weights[i] for i in kept)
    nucleus, mass = [], 0.0
    for i in kept:
        if mass < top_p:
            nucleus.append(i)
        mass += weights[i] / total
    final = [i for i in nucleus if weights[i] >= min_p * weights[order[0]]]
    mass = sum(weights[i] for i in final)
    return [weights[i] / mass if i in final else 0.0 for i in range(VOCABULARY)]


def fits(counts: list[int], expected: list[float]) -> bool:
    """Chi-square with p > 1e-4; bins that expect fewer than 5 are one."""
    total = sum(counts)
    assert all(count == 0 for count, p in zip(counts, expected, strict=True) if p == 0), "a removed token was drawn"
    bins = [(c, total * p) for c, p in zip(counts, expected, strict=True) if p > 0]
    small = [(c, e) for c, e in bins if e < 5]
    bins = [(c, e) for c, e in bins if e >= 5]
    rest = float(sum(c for c, _ in small)), sum(e for _, e in small)
    if rest[1] >= 5:
        bins.append(rest)  # type: ignore[arg-type]
    elif rest[1] and rest[0] > 25:
        return False
    if len(bins) < 2:
        return sum(c for c, _ in bins) + rest[0] == total
    statistic = sum((c - e) ** 2 / e for c, e in bins)
    halves = torch.tensor([(len(bins) - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(halves[0], halves[1]).item() > 1e-4
