"""How layers are divided among stages of unlike devices, with made-up times and memory."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from evener.errors import MemoryPlanError
from evener_inspection.layer_split import Layers, StageCost, split_layers, stage_times

PLENTY = 1000


def alike(count: int) -> Layers:
    return Layers([0] * count, [0] * count)


def cost(layer: int, rest: int, most: int) -> StageCost:
    """Of a stage that holds ``most`` layers of one kind."""
    return StageCost([layer], rest, [3], 2, 5 * most)


def fits(layers: Layers, first: int, last: int, stage: StageCost) -> bool:
    held = sum(stage.weights[kind] for kind in layers.kinds[first:last])
    states = [state for state in layers.states[first:last] if state >= 0]
    return held + stage.state * max(map(states.count, states), default=0) <= stage.room


def all_divisions(layers: Layers, costs: list[StageCost]) -> Iterator[tuple[int, ...]]:
    """Those that fit, by trying each."""
    count = len(layers.kinds)
    for cuts in itertools.combinations(range(1, count), len(costs) - 1):
        edges = (0, *cuts, count)
        pairs = list(itertools.pairwise(edges))
        if all(fits(layers, first, last, stage) for (first, last), stage in zip(pairs, costs, strict=True)):
            yield tuple(last - first for first, last in pairs)


@pytest.mark.parametrize(
    ("count", "costs", "layers"),
    [
        (12, [(1, 0, PLENTY), (1, 0, PLENTY)], (6, 6)),
        (12, [(1, 0, PLENTY), (3, 0, PLENTY)], (9, 3)),
        (12, [(1, 0, PLENTY), (1, 4, PLENTY)], (8, 4)),  # a head as long as four layers
        (12, [(1, 0, 5), (3, 0, PLENTY)], (5, 7)),  # the fast device's memory holds five
        (12, [(1, 0, PLENTY), (500, 0, PLENTY)], (11, 1)),  # every stage has a layer
        (61, [(100, 0, 20), (100, 0, 20), (900, 300, PLENTY)], (20, 20, 21)),
    ],
)
def test_stages_take_equal_time_as_far_as_memory_allows(
    count: int, costs: list[tuple[int, int, int]], layers: tuple[int, ...]
) -> None:
    assert split_layers(alike(count), [cost(*each) for each in costs]) == layers


def test_layers_that_take_longer_count_for_more() -> None:
    """Two dense layers, then ten of experts, which take four times as long and are eight times as large."""
    layers = Layers([0, 0, *[1] * 10], [0] * 12)
    stage = StageCost([10, 40], 0, [1, 8], 1, PLENTY)
    assert split_layers(layers, [stage, stage]) == (7, 5)  # 220 and 200
    small = StageCost([10, 40], 0, [1, 8], 1, 30)
    assert split_layers(layers, [small, stage]) == (4, 8)  # two dense ones, two of experts, and their state: 22


def test_state_of_two_kinds_takes_the_room_of_the_more_frequent_one() -> None:
    """Layers with a window and with full attention in turn share the pool's pages."""
    kinds, stage = [0] * 8, StageCost([1], 0, [1], 10, 44)
    mixed, plain = Layers(kinds, [0, 1] * 4), Layers(kinds, [0] * 8)
    free = StageCost([5], 0, [1], 10, PLENTY)
    assert split_layers(mixed, [stage, free]) == (6, 2)  # 6 + 3 × 10 are within 44, and 7 + 4 × 10 are not
    assert split_layers(plain, [stage, free]) == (4, 4)  # 4 + 4 × 10


def test_no_other_division_is_faster() -> None:
    draw, impossible = random.Random(7), 0
    for _ in range(300):
        count, stages, kinds = draw.randint(3, 10), draw.randint(2, 4), draw.randint(1, 3)
        layers = Layers([draw.randrange(kinds) for _ in range(count)], [draw.randint(-1, 1) for _ in range(count)])
        costs = [
            StageCost([draw.randint(1, 9) for _ in range(kinds)], draw.randint(0, 9),
                      [draw.randint(1, 9) for _ in range(kinds)], draw.randint(0, 4), draw.randint(10, 60))
            for _ in range(stages)
        ]  # fmt: skip
        others = list(all_divisions(layers, costs))
        if not others:
            impossible += 1
            with pytest.raises(MemoryPlanError, match="the stages hold at most"):
                split_layers(layers, costs)
            continue
        mine = split_layers(layers, costs)
        assert mine in others
        assert max(stage_times(mine, layers, costs)) == min(max(stage_times(o, layers, costs)) for o in others)
    assert 10 < impossible < 200


def test_a_model_of_many_layers_and_kinds_is_divided_soon() -> None:
    layers = Layers([n % 5 for n in range(200)], [n % 2 for n in range(200)])
    costs = [StageCost([3, 5, 7, 9, 11], 4, [1] * 5, 1, PLENTY) for _ in range(16)]
    times = stage_times(split_layers(layers, costs), layers, costs)
    assert max(times) <= 1.1 * sum(times) / len(times)


def test_layers_that_no_memory_holds_are_refused_with_what_each_stage_holds() -> None:
    with pytest.raises(MemoryPlanError, match="the stages hold at most 4, 0, 3 of the model's 20 layers: lower"):
        split_layers(alike(20), [cost(1, 0, 4), cost(1, 0, -2), cost(1, 0, 3)])
