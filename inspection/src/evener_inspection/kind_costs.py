"""What one layer of each kind costs, from runs with and without it, and what the whole model would cost.

A step of the layers that run takes ``rest + sum(n * cost)`` over the kinds of layers: ``n`` layers of a kind run, and
``rest`` is the embedding, the head, sampling and the engine's own work. With several kinds, a run without the layers of
one kind takes ``n * cost`` less. With one kind, a run of its first layer alone takes ``(n - 1) * cost`` less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CostRun:
    """A run with fewer layers.

    Attributes:
        kind: whose cost it shows.
        layers: numbers of the layers that run.
        fewer: how many layers of the kind it lacks.
    """

    kind: str
    layers: tuple[int, ...]
    fewer: int


@dataclass(frozen=True)
class Costs:
    """Seconds of a layer by kind, and of the rest of a step. None: less than the runs differ by chance."""

    layers: Mapping[str, float | None]
    rest: float | None


def cost_runs(chosen: Sequence[int], kinds: Mapping[str, Sequence[int]]) -> list[CostRun]:
    """The runs that are needed beside the one of all ``chosen`` layers; none for a single layer, whose cost cannot be
    told from the rest.

    Args:
        kinds: the numbers of all layers of the model, by kind.
    """
    present = {kind: [n for n in chosen if n in numbers] for kind, numbers in kinds.items()}
    present = {kind: numbers for kind, numbers in present.items() if numbers}
    if len(present) == 1:
        ((kind, numbers),) = present.items()
        return [CostRun(kind, tuple(numbers[:1]), len(numbers) - 1)] if len(numbers) > 1 else []
    return [CostRun(kind, tuple(n for n in chosen if n not in own), len(own)) for kind, own in present.items()]


def costs(whole: float, runs: Sequence[tuple[CostRun, float]], chosen: Mapping[str, int]) -> Costs:
    """The costs.

    Args:
        whole: seconds of a step with all chosen layers.
        runs: those of ``cost_runs``, with the seconds of their steps.
        chosen: how many layers of each kind run.
    """
    found = {run.kind: (whole - seconds) / run.fewer for run, seconds in runs}
    rest = whole - sum(chosen[kind] * cost for kind, cost in found.items())
    return Costs({kind: _positive(cost) for kind, cost in found.items()}, _positive(rest))


def estimate(found: Costs, counts: Mapping[str, int]) -> float | None:
    """Seconds of a step of a model with so many layers of each kind; None if a part of it is not known."""
    total = found.rest
    for kind, count in counts.items():
        cost = found.layers.get(kind)
        total = None if cost is None or total is None else total + count * cost
    return total


def _positive(seconds: float) -> float | None:
    return seconds if seconds > 0 else None
