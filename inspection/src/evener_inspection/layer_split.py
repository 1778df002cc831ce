"""The division of layers among stages on unlike devices whose slowest stage takes the least time, under the memory of
each. Nothing is measured here. Torch-free.

A stage takes the time of its layers on its device, and of what it computes beside them: the head, on the last stage.
Layers of one model may differ: dense ones and ones with experts, attention and recurrent state, other formats. So the
best division is searched for, by dynamic programming over the first layers and the first stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from evener.errors import MemoryPlanError


@dataclass(frozen=True)
class Layers:
    """A model's layers, in order.

    Attributes:
        kinds: of each layer, a number from 0; those of one kind have the same weights.
        states: of each layer, a number for what state it has; -1: none.
    """

    kinds: Sequence[int]
    states: Sequence[int]


@dataclass(frozen=True)
class StageCost:
    """What layers cost on one stage's device.

    Attributes:
        times: of one layer of each kind; ``rest``: of what the stage computes beside its layers, in the same unit.
        weights: bytes of one layer of each kind.
        state: bytes of the state of one layer, for one request of the greatest length.
        room: bytes for layers and their state.
    """

    times: Sequence[int]
    rest: int
    weights: Sequence[int]
    state: int
    room: int

    def runs(self, layers: Layers, first: int) -> Iterator[tuple[int, int]]:
        """``(last + 1, time)`` of every run of layers from ``first`` on that the memory holds. State of different kinds
        shares the pool's pages: the pool has room for the kind that most layers have."""
        held, states, time = 0, Counter[int](), self.rest
        for at in range(first, len(layers.kinds)):
            kind, state = layers.kinds[at], layers.states[at]
            held, time = held + self.weights[kind], time + self.times[kind]
            states[state] += state >= 0
            if held + max(states.values()) * self.state > self.room:
                return
            yield at + 1, time

    def most(self, layers: Layers) -> int:
        """How many consecutive layers the memory holds."""
        return max(max((last for last, _ in self.runs(layers, at)), default=at) - at for at in range(len(layers.kinds)))


def split_layers(layers: Layers, costs: Sequence[StageCost]) -> tuple[int, ...]:
    """How many layers each stage gets, at least one, so that the slowest stage takes the least time; of such divisions,
    one whose stages take the least time together.

    Raises:
        MemoryPlanError: the stages' memory does not hold all layers.
    """
    count, stages = len(layers.kinds), len(costs)
    #: By the number of layers that the stages so far have: (slowest, sum, their ends).
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for stage, cost in enumerate(costs):
        found: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for first, (slowest, total, ends) in best.items():
            for last, time in cost.runs(layers, first):
                if last > count - (stages - stage - 1):  # each later stage has a layer
                    break
                mine = max(slowest, time), total + time, (*ends, last)
                found[last] = min(found.get(last, mine), mine)
        best = found
    if count not in best:
        most = ", ".join(str(cost.most(layers)) for cost in costs)
        raise MemoryPlanError(f"the stages hold at most {most} of the model's {count} layers: lower infer.max_reqs or "
                              "infer.max_seq_len, or add a stage with infer.stages")  # fmt: skip
    ends = best[count][2]
    return tuple(last - first for first, last in zip((0, *ends), ends, strict=False))


def stage_times(partition: Sequence[int], layers: Layers, costs: Sequence[StageCost]) -> list[int]:
    """The time that each stage takes with ``partition``."""
    starts = accumulate(partition, initial=0)
    return [
        cost.rest + sum(cost.times[kind] for kind in layers.kinds[start : start + many])
        for start, many, cost in zip(starts, partition, costs, strict=False)
    ]
