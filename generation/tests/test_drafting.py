"""When requests get drafts: not where they were wrong before, and only while drafts make more tokens a second."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from evener.contracts.generation.drafter import BY_WORKER
from evener.contracts.generation.drafts import NEVER, NOT_YET
from evener_generation.drafting.grammar_drafter import GrammarDrafter
from evener_generation.drafting.model_drafter import ModelDrafter
from evener_generation.drafting.ngram_drafter import NgramDrafter
from evener_generation.drafting.payoff import Payoff
from evener_generation.drafting.speculation import Speculation


class DecodingStub:
    """What ``DecodingRequest`` asks for."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def decoding(*tokens: int) -> Any:
    return DecodingStub(
        tokens=[*tokens], unread=0, computed=len(tokens) - 1, length=len(tokens), limit=20, decodes=True,
    )  # fmt: skip


@pytest.mark.parametrize("by_worker", [True, False])
def test_only_a_drafter_that_says_so_may_leave_the_ids_to_the_worker(by_worker: bool) -> None:
    drafter = type("Mine", (ModelDrafter,), {"by_worker": by_worker})
    speculation = Speculation(drafter, 3, 8, vocabulary=9)
    speculation.begin([], 1)
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


def test_each_try_that_changes_nothing_doubles_the_pause_before_the_next_and_a_change_ends_that() -> None:
    payoff, speed = Payoff(), {True: 0.5, False: 1.0}

    def tries(steps: int) -> list[int]:
        """At which of so many steps the slower way begins to be tried."""
        ways = []
        for _ in range(steps):
            ways.append(payoff.pays(4))
            payoff.record(4, ways[-1], 4, 1 / speed[ways[-1]])
        return [at for at in range(1, steps) if ways[at] and not ways[at - 1]]

    tries(16)
    at = tries(14_000)
    assert [b - a for a, b in pairwise(at)] == [256 + 4, 512 + 4, 1024 + 4, *[2048 + 4] * (len(at) - 4)]
    speed[True] = 4.0
    tries(2100)
    assert payoff.pays(4)
    speed[True] = 0.5
    tries(20)
    assert not payoff.pays(4) and 100 < tries(200)[0] <= 128


def answered(speculation: Speculation, request: Any, *ids: int) -> list[int]:
    """The worker answers these to what is asked for a request; one token more is there then. Returns what was asked."""
    speculation.begin([], 1)
    asked = speculation.propose(request, 9)
    start, right = len(request.tokens) - 1, sum(id > 0 for id in ids)
    request.tokens += [1] * (1 + right)
    request.length, request.computed = len(request.tokens), len(request.tokens) - 1
    drafts = list(ids[: len(asked)])
    row = DecodingStub(request=request, start=start, count=1 + len(drafts), drafts=drafts, samples=1, recomputed=0)
    speculation.record([row], speculation.on, 1 + right)
    return asked


def test_a_worker_that_needs_more_steps_is_asked_again_at_once_and_one_that_cannot_seldom() -> None:
    speculation = Speculation(ModelDrafter, 3, 8, vocabulary=99)
    request = decoding(1, 2, 3)
    request.limit = 500
    for _ in range(5):
        assert answered(speculation, request, *[NOT_YET] * 3) == [BY_WORKER] * 3
    assert answered(speculation, request, *[NEVER] * 3) == [BY_WORKER] * 3
    assert [len(answered(speculation, request, *[NEVER] * 3)) for _ in range(34)] == [0] * 32 + [3, 0]
    for _ in range(31):
        answered(speculation, request)
    assert answered(speculation, request, 7, 7, 7) == [BY_WORKER] * 3


@pytest.mark.parametrize("answer", [NOT_YET, NEVER])
def test_steps_in_which_the_worker_makes_no_drafts_do_not_say_what_drafts_cost(answer: int) -> None:
    payoff, times = Payoff(), iter(range(99))
    speculation = Speculation(ModelDrafter, 3, 8, vocabulary=99, payoff=payoff, clock=lambda: float(next(times)))
    lost = decoding(1, 2, 3)
    lost.limit = 500
    for _ in range(20):
        answered(speculation, lost, *[answer] * 3)
    assert payoff._load(1).drafted.steps == 0 and payoff.pays(1), "the try goes on until there are some"
    fresh = decoding(1, 2, 3)
    fresh.limit = 500
    for _ in range(9):
        answered(speculation, fresh, 7, 7, 7)
    assert payoff._load(1).drafted.steps == 8 and not payoff.pays(1)


def test_a_step_in_which_the_worker_makes_up_for_a_rest_is_not_measured() -> None:
    payoff, times = Payoff(), iter(range(99))
    speculation = Speculation(ModelDrafter, 3, 8, vocabulary=99, payoff=payoff, clock=lambda: float(next(times)))
    request = decoding(*range(80))
    request.limit = 500
    answered(speculation, request, 7, 7, 7)
    answered(speculation, request, 7, 7, 7)
    assert payoff._load(1).drafted.steps == 1, "the first one computes the prompt"
    speculation._failed = True
    for _ in range(50):
        answered(speculation, request)
    speculation._failed = False
    for _ in range(3):
        answered(speculation, request, 7, 7, 7)
    assert payoff._load(1).drafted.steps == 1 + 2


def test_forced_tokens_are_proposed_within_all_limits_and_are_no_reason_to_pause() -> None:
    speculation = Speculation(GrammarDrafter, 4, 8, vocabulary=99)
    speculation.forced = lambda request: list(range(50, 60)) if request.tokens[0] == 1 else None
    speculation.begin([], 1)
    held, free = decoding(1, 2, 3), decoding(2, 2, 3)
    assert speculation.propose(held, 9) == [50, 51, 52, 53] and speculation.propose(free, 9) == []
    assert speculation.propose(held, 9) == [50, 51, 52], "the step samples no more than the memory plan has room for"
    for fields, count in (({"limit": 5}, 1), ({"limit": 4}, 0), ({"decodes": False}, 0)):
        speculation.begin([], 1)
        request = DecodingStub(**{**vars(held), **fields})
        assert len(speculation.propose(request, 9)) == count
    speculation.begin([], 1)
    assert speculation.propose(held, 2) == [50, 51]
    # A request whose last token was not read waits only where something may be forced.
    for request, waits in ((held, True), (free, False)):
        assert speculation.waits(DecodingStub(**{**vars(request), "unread": 1})) == waits
        assert not speculation.waits(request)
    row = DecodingStub(request=held, start=2, count=3, drafts=[50, 51], samples=3, recomputed=0)
    for _ in range(9):
        speculation.record([row], True, 1)
    speculation.begin([], 1)
    assert speculation.propose(held, 9) == [50, 51, 52, 53]


def test_a_drafter_guesses_where_a_grammar_forces_nothing() -> None:
    speculation = Speculation(NgramDrafter, 4, 8, vocabulary=99)
    speculation.forced = lambda request: [60] if request.tokens[0] == 1 else []
    speculation.begin([], 2)
    assert speculation.propose(decoding(1, 7, 8, 9, 7, 8), 9) == [60]
    assert speculation.propose(decoding(2, 7, 8, 9, 7, 8), 9) == [9, 7, 8, 9]
    worker = Speculation(ModelDrafter, 3, 8, vocabulary=99)
    worker.forced = speculation.forced
    worker.begin([], 1)
    assert worker.propose(decoding(1, 2, 3), 9) == [BY_WORKER] * 3


def unread(*tokens: int) -> Any:
    """A request whose last plan is in flight."""
    request = decoding(*tokens)
    request.unread = 1
    return request


@pytest.mark.parametrize(("ready", "waiting", "together"), [(5, 1, False), (4, 1, True), (1, 3, True), (3, 0, False)])
def test_two_groups_of_requests_with_drafts_come_together_again(ready: int, waiting: int, together: bool) -> None:
    """Many do not wait for one, which joins them when its token is read and theirs are not."""
    speculation = Speculation(ModelDrafter, 3, 32, vocabulary=9)
    read, others = [decoding(1, 2, 3) for _ in range(ready)], [unread(1, 2, 3) for _ in range(waiting)]
    speculation.begin([*read, *others], 0)
    assert all(speculation.waits(request) for request in others)
    assert [speculation.waits(request) for request in read] == [together] * ready


def test_many_requests_without_drafts_do_not_wait_for_one() -> None:
    speculation = Speculation(lambda: NgramDrafter(), 3, 32, vocabulary=9)
    pausing, guessing = [unread(1, 2, 3) for _ in range(9)], unread(1, 2, 3)
    for request in pausing:
        speculation._known(request).resume = 99
    speculation.begin([*pausing, guessing], 0)
    assert speculation.waits(guessing) and not any(map(speculation.waits, pausing))


def test_a_request_whose_prompt_is_computed_waits_for_no_drafts_of_others() -> None:
    prompt = decoding(1, 2, 3)
    prompt.decodes = False
    speculation = Speculation(ModelDrafter, 3, 32, vocabulary=9)
    speculation.begin([prompt, unread(1, 2)], 0)
    assert not speculation.waits(prompt)


def test_requests_share_the_room_of_a_step_equally() -> None:
    speculation = Speculation(ModelDrafter, 4, max_samples=12, vocabulary=9)
    requests = [decoding(1, 2, 3) for _ in range(4)]
    speculation.begin(requests, 0)
    assert [len(speculation.propose(request, 9)) for request in requests] == [2, 2, 2, 2]
