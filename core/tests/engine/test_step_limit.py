"""An installed package may limit the steps of a server: it hears how long each took. Clocks are simulated."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from timed_device import SimulatedDevice

from evener.builtin.kinds import BUILTIN_KINDS
from evener.contracts.state import StateSpec, StateTensor
from evener.engine.batching import StepLimit, TimedExecutor
from evener.engine.controller.controller import Controller
from evener.engine.controller.scheduler import Scheduler
from evener.engine.controller.state import StateManager
from evener.engine.processes.start import build_controller
from evener.engine.wire.media import StepMedia
from evener.engine.wire.messages import NewRequest, Sampling
from evener.engine.wire.plan import Plan, StepResult
from evener.plugins.catalog import Catalog


class Listening(StepLimit):
    """Allows a fixed number of tokens and keeps what it is asked and told."""

    def __init__(self, tokens: int = 64) -> None:
        self.tokens = tokens
        self.asked: list[tuple[int, list[str], list[str]]] = []
        self.told: list[tuple[int, float]] = []

    def allowed(self, most: int, running: Sequence[Any], waiting: Sequence[Any]) -> int:
        self.asked.append((most, [each.id for each in running], [each.id for each in waiting]))
        return min(most, self.tokens)

    def record(self, plan: Plan, seconds: float) -> None:
        self.told.append((sum(plan.counts), seconds))


def asks(name: str, prompt: int, answer: int) -> NewRequest:
    sampling = Sampling(temperature=0.0)
    return NewRequest(id=name, prompt=list(range(prompt)), max_tokens=answer, sampling=sampling)


def controller_over(device: SimulatedDevice, limit: StepLimit, depth: int) -> Controller:
    spec = StateSpec("full", (StateTensor("key", (1, 8), "float32"),))
    state = StateManager([spec], {kind.name: kind for kind in BUILTIN_KINDS}, 16, 2_000, prefix_cache=False)
    return Controller(Scheduler(state, 2, 2048, limit=limit), TimedExecutor(device, limit, device.clock), depth)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_limit_is_asked_before_each_step_and_told_how_long_it_took(background: bool, depth: int) -> None:
    device = SimulatedDevice(lambda plan: 0.05 + 0.001 * sum(plan.counts), background)
    limit = Listening()
    controller = controller_over(device, limit, depth)
    controller.handle([asks("a", 100, 3), asks("b", 200, 3), asks("c", 10, 3)])
    while not controller.idle:
        controller.step()
    assert limit.asked[:3] == [(2048, [], ["a", "b", "c"]), (2048, ["a"], ["b", "c"]), (2048, ["a", "b"], ["c"])]
    assert max(sum(plan.counts) for plan in device.steps) == 64
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


def test_steps_are_limited_only_for_answers_that_are_streamed(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, answers = Listening(), Catalog.answers
    monkeypatch.setattr(
        Catalog, "answers", lambda self, kind, *a: iter([made]) if kind == "step limit" else answers(self, kind, *a)
    )

    def limits(streaming: bool, **keys: Any) -> bool:
        config = make_config("Llama", {"num_hidden_layers": 1}, **{"infer.step_tokens": "auto", **keys})
        controller, _ = build_controller(config, streaming=streaming)
        assert isinstance(controller.executor, TimedExecutor) == (controller.scheduler.limit is made)
        return controller.scheduler.limit is made

    assert limits(True)
    assert not limits(False), "a batch gets the same steps in every run"
    assert not limits(True, **{"infer.step_tokens": 64}), "an explicit budget means what it says"
    assert not limits(True, **{"infer.step_target": 0})


def test_without_a_package_that_limits_steps_each_has_the_whole_budget(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Catalog.lazy_imports
    monkeypatch.setattr(Catalog, "lazy_imports", lambda self, kind: {} if kind == "step limit" else found(self, kind))
    config = make_config("Llama", {"num_hidden_layers": 1}, **{"infer.step_tokens": "auto"})
    controller, _ = build_controller(config, streaming=True)
    assert controller.scheduler.limit.allowed(2048, [], []) == 2048
