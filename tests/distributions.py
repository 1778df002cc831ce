"""The exact distribution of sampled tokens, by hand, and whether draws have it."""

from __future__ import annotations

import math
from collections.abc import Callable
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

#: A prompt and an answer so far; some ids stand in both, some in one, some in none.
PROMPT, ANSWER = [0, 3, 3, 7, 10], [3, 5, 5, 5, 0, 8]
#: Each penalty, biases, ids that must not come, and all of them.
PENALTIES: list[dict[str, Any]] = [
    {"repetition": 1.5},
    {"repetition": 0.6},
    {"frequency": 0.5},
    {"frequency": -0.4},
    {"presence": 1.25},
    {"presence": -2.0},
    {"bias": {1: 2.0, 5: -1.5, 11: 0.25}},
    {"bias": {4: -100.0}},
    {"barred": [2, 6]},
    {
        "repetition": 1.2, "frequency": 0.3, "presence": 0.4, "bias": {0: 1.0, 5: 0.5}, "barred": [9],
        "temperature": 0.8, "top_k": 9, "top_p": 0.95, "min_p": 0.01,
    },
]  # fmt: skip


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


def adjusted(settings: dict[str, Any]) -> tuple[dict[str, Any], list[float]]:
    """The filters of one of ``PENALTIES``, and the logits that the rest of it leaves, by hand."""
    filters = {k: v for k, v in settings.items() if k in ("temperature", "top_k", "top_p", "min_p")}
    repetition, frequency, presence = _penalties(settings)
    logits = LOGITS.tolist()
    for i, value in _biases(settings).items():
        logits[i] += value
    for i in {*PROMPT, *ANSWER}:
        logits[i] = logits[i] / repetition if logits[i] > 0 else logits[i] * repetition
    return filters, [x - frequency * ANSWER.count(i) - presence * (i in ANSWER) for i, x in enumerate(logits)]


def adjusted_by(op: Callable[[str], Any], settings: dict[str, Any]) -> torch.Tensor:
    """The same logits, float32 [1, VOCABULARY], as the ops ``add_bias`` and ``penalize`` make them."""
    known, biases = torch.tensor([PROMPT + ANSWER], dtype=torch.int32), _biases(settings)
    length = torch.tensor([known.shape[1]], dtype=torch.int32)
    logits = LOGITS[None].clone()
    if biases:
        entries, values = torch.tensor([list(biases)], dtype=torch.int32), torch.tensor([list(biases.values())])
        logits = op("add_bias")(logits, entries, values, torch.full_like(entries, known.shape[1] + 1), length)
    penalties = (torch.tensor([value]) for value in _penalties(settings))
    prompt = torch.tensor([len(PROMPT)], dtype=torch.int32)
    return op("penalize")(logits, known, 0 * length, prompt, length, known.shape[1], *penalties)  # type: ignore[no-any-return]


def _penalties(settings: dict[str, Any]) -> tuple[float, ...]:
    off = {"repetition": 1.0, "frequency": 0.0, "presence": 0.0}
    return tuple(settings.get(name, value) for name, value in off.items())


def _biases(settings: dict[str, Any]) -> dict[int, float]:
    return {**settings.get("bias", {}), **dict.fromkeys(settings.get("barred", []), -math.inf)}


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
