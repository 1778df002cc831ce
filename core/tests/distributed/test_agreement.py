"""What ranks settle together, and which groups they open for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evener.distributed.agreement import Agreement
from evener.distributed.world import RankPlacement, World
from evener_inspection.thread_communicator import ThreadCommunicator, run_on_threads


def test_all_ranks_get_the_least_the_most_and_what_all_have() -> None:
    own = [[7, 2], [3, 9], [5, 5]]

    def settle(group: ThreadCommunicator) -> tuple[list[int], list[int], list[int]]:
        agreement, mine = Agreement(group), own[group.rank]
        return agreement.least(mine), agreement.most(mine), agreement.common([128, 16, 32 + group.rank, 64])

    assert run_on_threads(3, settle) == [([3, 2], [7, 9], [16, 64, 128])] * 3


def test_a_rank_alone_keeps_its_own() -> None:
    alone = Agreement()
    assert (alone.least([7, 2]), alone.most([7, 2]), alone.common([128, 16])) == ([7, 2], [7, 2], [128, 16])


def test_stages_on_different_backends_share_groups_in_host_memory_and_open_these_first() -> None:
    opened: list[tuple[str, str, Sequence[int]]] = []

    def factory(kind: str) -> Any:
        return lambda name, ranks, *_: opened.append((kind, name, ranks))

    place = RankPlacement(World.of(2, 2, 2), device=1, local_size=3)
    groups = place.open(factory("own"), factory("host"))
    assert opened == [("host", "pp", (0, 2)), ("host", "ids", (0, 2)), ("own", "tp", (2, 3))]
    assert (groups.through_host, groups.device, groups.local_size) == (True, 1, 3)
    opened.clear()
    assert not place.open(factory("own")).through_host
    assert opened == [("own", "tp", (2, 3)), ("own", "pp", (0, 2)), ("own", "ids", (0, 2))]
