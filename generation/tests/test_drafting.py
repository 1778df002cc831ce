"""When requests get drafts: not where they were wrong before, and only while drafts make more tokens a second."""

from __future__ import annotations

from typing import Any

import pytest

from evener.contracts.generation.drafter import BY_WORKER
from evener_generation.drafting.model_drafter import ModelDrafter
from evener_generation.drafting.payoff import Payoff
from evener_generation.drafting.speculation import Speculation


class DecodingStub:
    """What ``DecodingRequest`` asks for."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def decoding(*tokens: int) -> Any:
    return DecodingStub(
        tokens=[*tokens], unread=0, planned=len(tokens) - 1, length=len(tokens), limit=20, decodes=True,
        fork_points=set(),
    )  # fmt: skip


@pytest.mark.parametrize("by_worker", [True, False])
def test_only_a_drafter_that_says_so_may_leave_the_ids_to_the_worker(by_worker: bool) -> None:
    drafter = type("Mine", (ModelDrafter,), {"by_worker": by_worker})
    speculation = Speculation(drafter, 3, 8, vocabulary=9)
    speculation.begin(1)
    assert speculation.propose(decoding(1, 2, 3), 9) == ([BY_WORKER] * 3 if by_worker else [])
    assert speculation.on == by_worker


@pytest.mark.parametrize(("speed_with", "chosen"), [(1.5, True), (0.7, False)])
def test_the_faster_way_is_taken_and_the_other_tried_now_and_then(speed_with: float, chosen: bool) -> None:
    payoff, ways = Payoff(), []
    for _ in range(600):
        ways.append(payoff.pays(4))
        payoff.record(4, ways[-1], 4, 1 / speed_with if ways[-1] else 1.0)
    assert ways[:8] == [True] * 8 and ways[8:16] == [False] * 8
    taken = ways[16:].count(chosen) / len(ways[16:])
    assert 0.95 < taken < 1, "the other way is tried too: the load may change"


def test_each_number_of_requests_has_its_own_verdict() -> None:
    payoff = Payoff()
    for _ in range(40):
        for requests, factor in ((1, 2.0), (64, 0.5)):
            on = payoff.pays(requests)
            payoff.record(requests, on, requests, 1 / factor if on else 1.0)
    assert payoff.pays(1) and not payoff.pays(64)
