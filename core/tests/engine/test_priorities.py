"""Who starts first under overload: higher priorities, and nobody waits for ever. Time is a number that tests set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from evener.engine.controller import request as requests
from evener.engine.controller.controller import Controller
from evener.engine.controller.scheduler import AGING_SECONDS
from evener.engine.wire.messages import Finished, NewRequest, Sampling
from evener_conformance.reference.executor import strict_controller


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(requests, "time", found)
    return found


@pytest.fixture
def one_at_a_time(make_config: Any) -> Controller:
    """An engine with one slot, so that all but one request wait."""
    settings = {"infer.max_reqs": 1, "infer.depth": 1, "reference.delay": True}
    return strict_controller(make_config("Llama", {"num_hidden_layers": 1}, **settings))[0]


def asks(name: str, priority: int) -> NewRequest:
    return NewRequest(id=name, prompt=[1, 2, 3], max_tokens=2, priority=priority, sampling=Sampling(temperature=0.0))


def ended(controller: Controller, until: Callable[[list[str]], bool], arrive: Callable[[], None]) -> list[str]:
    """Run until so many have ended; ``arrive`` is called before each step. The order in which requests ended."""
    order: list[str] = []
    for _ in range(2000):
        if until(order):
            return order
        arrive()
        order += [event.id for event in controller.step() if isinstance(event, Finished)]
    raise AssertionError(f"it went on for 2000 steps: {order[-5:]}")


def test_higher_priorities_start_first_and_equal_ones_in_the_order_of_arrival(
    clock: Clock, one_at_a_time: Controller
) -> None:
    names = [("low", -1), ("first", 0), ("second", 0), ("high", 2), ("higher", 3)]
    controller = one_at_a_time
    for name, priority in names:
        clock.now += 1
        controller.handle([asks(name, priority)])
    order = ended(controller, lambda order: len(order) == 5, lambda: None)
    assert order == ["higher", "high", "first", "second", "low"]


def test_under_overload_high_ones_go_on_coming_first_and_a_low_one_starts_after_a_bounded_wait(
    clock: Clock, one_at_a_time: Controller
) -> None:
    controller, count = one_at_a_time, 0

    def arrive() -> None:
        """More high ones than can be served: two for each step, of which one request takes two; a second passes."""
        nonlocal count
        clock.now += 1
        for _ in range(2):
            controller.handle([asks(f"high-{count}", 3)])
            count += 1

    arrive()
    controller.handle([asks("low", 0)])
    came = clock.now
    order = ended(controller, lambda order: "low" in order, arrive)
    # Before it, all that came within three times the aging: none that came later overtakes it.
    assert all(name.startswith("high") for name in order[:-1])
    overtook = 2 * (1 + 3 * AGING_SECONDS)
    assert len(order) - 1 <= overtook and int(order[-2].removeprefix("high-")) <= overtook
    assert clock.now - came > 3 * AGING_SECONDS
    assert len(controller.scheduler.waiting) > 100  # it is still overloaded


def test_a_difference_of_one_counts_as_much_as_its_time(clock: Clock, one_at_a_time: Controller) -> None:
    controller = one_at_a_time
    controller.handle([asks("runs", 0)])
    controller.step()
    controller.handle([asks("waited", 0)])
    clock.now += AGING_SECONDS + 0.1
    controller.handle([asks("late", 1)])
    clock.now += 0.1
    controller.handle([asks("later", 2)])
    order = ended(controller, lambda order: len(order) == 4, lambda: None)
    assert order == ["runs", "later", "waited", "late"]
