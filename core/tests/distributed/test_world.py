"""How ranks are numbered and grouped."""

from __future__ import annotations

import pytest

from evener.distributed.world import World
from evener.errors import EngineError


def test_every_rank_has_one_place_and_is_in_its_own_groups() -> None:
    places = [World.of(rank, tp_size=3, pp_size=2) for rank in range(6)]
    assert [(w.pp_rank, w.tp_rank) for w in places] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    for world in places:
        assert world.rank in world.tp_ranks and world.rank in world.pp_ranks
        assert world.tp_ranks.index(world.rank) == world.tp_rank
        assert world.pp_ranks.index(world.rank) == world.pp_rank
        assert all(places[rank].tp_ranks == world.tp_ranks for rank in world.tp_ranks)
        assert all(places[rank].pp_ranks == world.pp_ranks for rank in world.pp_ranks)
    assert [w.rank for w in places if w.first_stage] == [0, 1, 2]
    assert [w.rank for w in places if w.reports] == [3]


def test_a_world_of_one_is_first_last_and_reports() -> None:
    assert World() == World.of(0) and World().first_stage and World().reports


@pytest.mark.parametrize("fields", [(0, 2, 0, 1, 1, 2), (2, 2, 0, 1, 2, 2), (0, 2, 0, 2, 0, 2)])
def test_numbers_that_contradict_each_other_are_refused(fields: tuple[int, ...]) -> None:
    with pytest.raises(EngineError, match="contradicts itself"):
        World(*fields)
