"""How layers are divided among stages of unlike devices, with made-up times and memory."""

from __future__ import annotations

import itertools
import random

import pytest

from evener.errors import MemoryPlanError
from evener_inspection.layer_split import StageCost, split_layers

PLENTY = 1000


def slowest(layers: tuple[int, ...], costs: list[StageCost]) -> int:
    return max(n * cost.layer + cost.rest for n, cost in zip(layers, costs, strict=True))


@pytest.mark.parametrize(
    ("count", "costs", "layers"),
    [
        (12, [(1, 0, PLENTY), (1, 0, PLENTY)], (6, 6)),
        (12, [(1, 0, PLENTY), (3, 0, PLENTY)], (9, 3)),
        (12, [(1, 0, PLENTY), (1, 4, PLENTY)], (8, 4)),  # a head as long as four layers
        (12, [(1, 0, 5), (3, 0, PLENTY)], (5, 7)),  # the fast device's memory holds five
        (12, [(1, 0, PLENTY), (500, 0, PLENTY)], (11, 1)),  # every stage has a layer
        (13, [(1, 0, PLENTY), (1, 0, PLENTY)], (7, 6)),
        (61, [(100, 0, 20), (100, 0, 20), (900, 300, PLENTY)], (20, 20, 21)),
        (3, [(5, 0, PLENTY), (1, 0, PLENTY), (2, 9, 0)], (1, 1, 1)),
    ],
)
def test_stages_take_equal_time_as_far_as_memory_allows(
    count: int, costs: list[tuple[int, int, int]], layers: tuple[int, ...]
) -> None:
    assert split_layers(count, [StageCost(*cost) for cost in costs]) == layers


def test_no_other_division_is_faster() -> None:
    draw = random.Random(7)
    for _ in range(60):
        stages, count = draw.randint(2, 3), draw.randint(3, 9)
        costs = [StageCost(draw.randint(1, 9), draw.randint(0, 9), draw.randint(3, 9)) for _ in range(stages)]
        mine = split_layers(count, costs)
        assert sum(mine) == count and all(1 <= n <= cost.most for n, cost in zip(mine, costs, strict=True))
        ranges = [range(1, cost.most + 1) for cost in costs]
        others = [layers for layers in itertools.product(*ranges) if sum(layers) == count]
        assert slowest(mine, costs) == min(slowest(layers, costs) for layers in others)


def test_layers_that_no_memory_holds_are_refused_with_what_each_stage_holds() -> None:
    with pytest.raises(MemoryPlanError, match="the stages hold at most 4, 0, 3 of the model's 20 layers: lower"):
        split_layers(20, [StageCost(1, 0, 4), StageCost(1, 0, -2), StageCost(1, 0, 3)])
