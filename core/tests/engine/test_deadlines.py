"""A request with a deadline ends at that time, whether it waits, runs or is in flight."""

from __future__ import annotations

from typing import Any

from evener.engine.controller.controller import Controller
from evener.engine.controller.deadlines import Deadlines
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import Finished, NewRequest, Sampling, Tokens


class Clock:
    """Stands until it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def controller_with(clock: Clock, config: Any) -> Controller:
    controller, _ = build_controller(config)
    controller.deadlines = Deadlines(clock)
    return controller


def asks(name: str, max_time: float | None, max_tokens: int = 50) -> NewRequest:
    return NewRequest(
        id=name, prompt=[1, 2, 3], max_tokens=max_tokens, sampling=Sampling(temperature=0.0), max_time=max_time
    )


def test_running_and_waiting_requests_end_at_their_deadline_and_others_go_on(make_config: Any) -> None:
    clock = Clock()
    controller = controller_with(clock, make_config("Llama", {"num_hidden_layers": 1}, **{"infer.max_reqs": 2}))
    controller.handle([asks("runs", 5.0), asks("free", None, 20), asks("waits", 7.0), asks("late", 9.0)])
    events = [event for _ in range(6) for event in controller.step()]
    assert {e.id for e in events if isinstance(e, Tokens)} == {"runs", "free"}
    clock.now += 8
    ended = [e for e in controller.step() if isinstance(e, Finished)]
    assert [(e.id, e.reason, e.error) for e in ended] == [("runs", "timeout", None), ("waits", "timeout", None)]
    rest: list[Any] = []
    while not controller.idle:
        rest += controller.step()
    assert {e.id: e.reason for e in rest if isinstance(e, Finished)} == {"free": "length", "late": "length"}
    assert controller.scheduler.state.pool.used == 0
    assert not [e for e in rest if isinstance(e, Tokens) and e.id in ("runs", "waits")], "nothing comes after the end"


def test_a_deadline_does_not_outlive_its_request(make_config: Any) -> None:
    clock = Clock()
    controller = controller_with(clock, make_config("Llama", {"num_hidden_layers": 1}))
    controller.handle([asks("a", 5.0, 2)])
    while not controller.idle:
        controller.step()
    controller.handle([asks("a", None, 3)])
    clock.now += 10
    events: list[Any] = []
    while not controller.idle:
        events += controller.step()
    assert [e.reason for e in events if isinstance(e, Finished)] == ["length"]


def test_the_clock_is_not_read_without_deadlines() -> None:
    def never() -> float:
        raise AssertionError("nobody wants to know the time")

    deadlines = Deadlines(never)
    deadlines.set("a", None)
    assert list(deadlines.expired()) == []


def test_while_state_is_scarce_no_more_requests_wait_than_max_queue(make_config: Any, shrink_pool: Any) -> None:
    config = make_config("Llama", {"num_hidden_layers": 1}, **{"infer.max_reqs": 8, "serve.max_queue": 2})
    controller = controller_with(Clock(), config)
    size = controller.scheduler.state.block_size
    shrink_pool(controller, 4)

    def large(number: int) -> NewRequest:
        prompt = [number + 1] * (3 * size)
        return NewRequest(id=f"r{number}", prompt=prompt, max_tokens=size, sampling=Sampling(temperature=0.0))

    # One has three of the four blocks; the next is tried, and blocked.
    assert not [e for e in controller.handle([large(0), large(1)]) if isinstance(e, Finished)]
    steps = 0
    while not controller.scheduler.blocked and steps < size:
        steps += 1
        controller.step()
    assert controller.scheduler.blocked and len(controller.scheduler.waiting) == 1
    refused = [e for e in controller.handle([large(i) for i in range(2, 6)]) if isinstance(e, Finished)]
    assert [(e.id, e.reason, e.status) for e in refused] == [(f"r{i}", "error", 429) for i in (3, 4, 5)]
    rest: list[Any] = []
    while not controller.idle:
        rest += controller.step()
    assert {e.id: e.reason for e in rest if isinstance(e, Finished)} == dict.fromkeys(("r0", "r1", "r2"), "length")
    assert not controller.scheduler.blocked
