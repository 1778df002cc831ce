"""Steps in two halves: how rows are divided, how two functions take turns, and for which steps it is done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from evener.engine.wire.plan import DraftedTokens, Plan
from evener_offload.half_plans import half_plans
from evener_offload.halves import Halves
from evener_offload.halving import AGAIN, TRIES, Halving

Rows = list[tuple[int, int, int]]


def plan_of(rows: Rows, **more: Any) -> Plan:
    slots, starts, counts = map(list, zip(*rows, strict=True))
    return Plan(id=3, slots=slots, starts=starts, counts=counts, **more)


def rows_of(plan: Plan) -> Rows:
    return list(zip(plan.slots, plan.starts, plan.counts, strict=True))


@pytest.mark.parametrize(
    ("rows", "first", "second"),
    [
        ([(4, 10, 1), (2, 7, 1)], [(4, 10, 1)], [(2, 7, 1)]),
        ([(4, 10, 1), (2, 7, 1), (3, 0, 1)], [(4, 10, 1)], [(2, 7, 1), (3, 0, 1)]),
        ([(1, 0, 100)], [(1, 0, 48)], [(1, 48, 52)]),
        ([(1, 5, 100)], [(1, 5, 43)], [(1, 48, 57)]),
        ([(1, 30, 1), (2, 8, 100), (3, 9, 1)], [(1, 30, 1), (2, 8, 56)], [(2, 64, 44), (3, 9, 1)]),
        ([(1, 0, 50), (2, 0, 50)], [(1, 0, 50)], [(2, 0, 50)]),
    ],
)
def test_rows_are_divided_near_the_middle_between_requests_or_blocks(rows: Rows, first: Rows, second: Rows) -> None:
    found = half_plans(plan_of(rows), 16)
    assert found is not None and [rows_of(half) for half in found] == [first, second]


@pytest.mark.parametrize("rows", [[(1, 9, 1)], [(1, 0, 15)], [(1, 2, 1), (2, 0, 9)], [(1, 0, 33)]])
def test_a_step_without_a_place_near_its_middle_stays_whole(rows: Rows) -> None:
    assert half_plans(plan_of(rows), 32) is None


def test_proposed_tokens_stay_with_their_row_and_are_not_divided() -> None:
    drafts = [DraftedTokens(0, [5, 6]), DraftedTokens(2, [7])]
    found = half_plans(plan_of([(4, 15, 3), (2, 7, 1), (9, 15, 2)], drafts=drafts), 16)
    assert found is not None and [rows_of(half) for half in found] == [[(4, 15, 3)], [(2, 7, 1), (9, 15, 2)]]
    assert [half.drafts for half in found] == [[DraftedTokens(0, [5, 6])], [DraftedTokens(1, [7])]]
    assert half_plans(plan_of([(4, 15, 3)], drafts=drafts[:1]), 16) is None


def test_rows_with_adapters_stay_together() -> None:
    assert half_plans(plan_of([(4, 10, 1), (2, 7, 1)], adapted=True), 16) is None


# Turns


def layers(halves: Halves, name: str, log: list[str], count: int = 3) -> Callable[[], str]:
    """A half of ``count`` layers."""

    def run() -> str:
        for layer in range(count):
            log.append(f"{name}{layer}")
            wait = halves.compute(lambda layer=layer: f"{name}{layer} computed")  # type: ignore[misc]
            assert wait() == f"{name}{layer} computed"
        return name

    return run


def nothing() -> None:
    pass


def test_two_halves_go_on_in_turns_whenever_one_waits_for_the_host() -> None:
    halves, log = Halves(nothing), list[str]()
    assert not halves.active
    assert halves.run(layers(halves, "a", log), layers(halves, "b", log, 5)) == ("a", "b")
    assert log == ["a0", "b0", "a1", "b1", "a2", "b2", "b3", "b4"] and not halves.active
    log.clear()
    assert halves.run(layers(halves, "a", log, 3), layers(halves, "b", log, 0)) == ("a", "b")
    assert log == ["a0", "a1", "a2"]


def test_the_host_computes_for_one_half_while_the_other_one_goes_on() -> None:
    halves, gone_on = Halves(nothing), threading.Event()

    def first() -> bool:
        return halves.compute(lambda: gone_on.wait(20))()

    def second() -> bool:
        gone_on.set()
        return True

    assert halves.run(first, second) == (True, True)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("where", ["at once", "on the host", "later"])
def test_an_error_in_a_half_ends_both_and_is_raised(failing: int, where: str) -> None:
    halves, log = Halves(nothing), list[str]()

    def fail() -> None:
        raise ValueError(f"half {failing}")

    def bad() -> str:
        if where == "later":
            layers(halves, "x", log, 2)()
        if where == "on the host":
            halves.compute(fail)()
        fail()
        raise AssertionError

    both = [layers(halves, "y", log, 9), layers(halves, "y", log, 9)]
    both[failing] = bad
    with pytest.raises(ValueError, match=f"half {failing}"):
        halves.run(*both)
    assert len(log) < 9 and not halves.active
    assert halves.run(layers(halves, "a", log), layers(halves, "b", log)) == ("a", "b"), "it can be used again"


def test_each_thread_is_prepared_once() -> None:
    names: list[str] = []
    halves = Halves(lambda: names.append(threading.current_thread().name))
    for _ in range(2):
        halves.run(layers(halves, "a", []), layers(halves, "b", []))
    assert len(names) == 2 and any("second-half" in name for name in names) and any("host" in name for name in names)


# Which steps


def timed(halving: Halving, seconds: tuple[float, float], bucket: int = 4) -> list[bool]:
    """What is decided for steps that take so long whole, and halved."""
    found = []
    for _ in range(2 * TRIES):
        found.append(halving(bucket))
        halving.record(bucket, found[-1], seconds[found[-1]])
    return found


def test_steps_of_a_size_are_halved_if_that_was_measured_to_be_faster() -> None:
    halving = Halving("auto")
    assert timed(halving, (1.0, 0.5)) == [False, True] * TRIES and halving(4)
    assert timed(halving, (1.0, 0.99), 5) == [False, True] * TRIES and not halving(5)
    assert not halving(6), "another size is measured by itself"


def test_sizes_are_timed_again_after_many_steps() -> None:
    halving = Halving("auto")
    timed(halving, (1.0, 0.5))
    for _ in range(AGAIN):
        halving.record(4, True, 2.0)
    assert timed(halving, (1.0, 2.0)) == [False, True] * TRIES and not halving(4)


@pytest.mark.parametrize(("mode", "decided"), [("on", True), ("off", False)])
def test_a_mode_that_is_set_is_not_measured(mode: str, decided: bool) -> None:
    halving = Halving(mode)
    assert timed(halving, (1.0, 0.5) if not decided else (0.5, 1.0)) == [decided] * 2 * TRIES and halving(4) is decided


def test_ranks_halve_only_what_is_faster_on_each_of_them() -> None:
    from evener.distributed.agreement import Agreement
    from evener_inspection.thread_communicator import ThreadCommunicator, run_on_threads

    def rank(group: ThreadCommunicator) -> bool:
        halving = Halving("auto", Agreement(group))
        timed(halving, (1.0, 0.5 + group.rank))
        return halving(4)

    assert run_on_threads(2, rank) == [False, False]
