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


def test_a_rank_opens_its_groups_in_the_order_of_all_others() -> None:
    opened: list[tuple[str, Sequence[int]]] = []

    def factory(name: str, ranks: Sequence[int], *_: object) -> Any:
        opened.append((name, ranks))

    groups = RankPlacement(World.of(2, 2, 2), device=1, local_size=3).open(factory)
    assert opened == [("tp", (2, 3)), ("pp", (0, 2)), ("ids", (0, 2))]
    assert (groups.device, groups.local_size) == (1, 3)
