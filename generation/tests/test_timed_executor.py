"""Each step of a server is measured once, and its time is its own. Clocks are simulated."""

from __future__ import annotations

from collections import deque

import pytest
from evener_pacing.timed_executor import TimedExecutor, TimedLimit
from timed_device import SimulatedDevice

from evener.builtin.kinds import BUILTIN_KINDS
from evener.contracts.state import StateSpec, StateTensor
from evener.engine.controller.controller import Controller
from evener.engine.controller.scheduler import Scheduler
from evener.engine.controller.state import StateManager
from evener.engine.wire.media import StepMedia
from evener.engine.wire.messages import NewRequest, Sampling
from evener.engine.wire.plan import Plan, StepResult


class Listening(TimedLimit):
    """Allows 64 tokens, and keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, float]] = []

    def allowed(self, most: int, running: object, waiting: object) -> int:
        return min(most, 64)

    def record(self, plan: Plan, seconds: float) -> None:
        self.told.append((sum(plan.counts), seconds))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_limit_is_told_how_long_each_step_took(background: bool, depth: int) -> None:
    device = SimulatedDevice(lambda plan: 0.05 + 0.001 * sum(plan.counts), background)
    limit, spec = Listening(), StateSpec("full", (StateTensor("key", (1, 8), "float32"),))
    state = StateManager([spec], {kind.name: kind for kind in BUILTIN_KINDS}, 16, 2_000, prefix_cache=False)
    executor = TimedExecutor(device, limit, device.clock)
    controller = Controller(Scheduler(state, 2, 2048, limit=limit), executor, depth)
    greedy = Sampling(temperature=0.0)
    prompts = {"a": 100, "b": 200, "c": 10}
    controller.handle([
        NewRequest(id=name, prompt=list(range(tokens)), max_tokens=3, sampling=greedy)
        for name, tokens in prompts.items()
    ])  # fmt: skip
    while not controller.idle:
        controller.step()
    assert [tokens for tokens, _ in limit.told] == [sum(plan.counts) for plan in device.steps]
    assert sum(seconds for _, seconds in limit.told) == pytest.approx(device.now)
    full = [seconds for tokens, seconds in limit.told if tokens == 64]
    assert full == pytest.approx([0.114] * len(full)), "no step's time is another's"


def test_a_step_that_encodes_media_says_nothing_about_tokens() -> None:
    device, limit = SimulatedDevice(lambda plan: 1.0, background=True), Listening()
    executor = TimedExecutor(device, limit, device.clock)
    for plan in (Plan(id=0, counts=[4096], media=StepMedia([], [], [])), Plan(id=1, counts=[4096])):
        executor.submit(plan)
        executor.read()
    assert limit.told == [(4096, 1.0)]


def test_a_step_that_waits_for_masks_is_measured_once_with_both_waits() -> None:
    device, limit = SimulatedDevice(lambda plan: 0.0, background=True), Listening()
    executor = TimedExecutor(device, limit, device.clock)
    executor.submit(Plan(id=0, counts=[4096]))
    device._done = deque([(0.5, StepResult(plan=0, drafts=[[1]])), (1.0, StepResult(plan=0, ids=[1, 2]))])
    assert executor.read().proposed and limit.told == []
    assert not executor.read().proposed
    assert limit.told == [(4096, 1.0)]


def test_the_executor_that_a_limit_wraps_is_measured() -> None:
    device = SimulatedDevice(lambda plan: 1.0, background=False)
    wrapped = Listening().wrap(device)
    assert isinstance(wrapped, TimedExecutor) and wrapped.inner is device
