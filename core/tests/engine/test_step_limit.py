"""An installed package may limit the steps of a server, and wrap the executor that runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from timed_device import SimulatedDevice

from evener.builtin.kinds import BUILTIN_KINDS
from evener.contracts.state import StateSpec, StateTensor
from evener.engine.batching.step_limit import StepLimit
from evener.engine.controller.controller import Controller
from evener.engine.controller.scheduler import Scheduler
from evener.engine.controller.state import StateManager
from evener.engine.processes.start import build_controller
from evener.engine.wire.executor import Executor
from evener.engine.wire.messages import NewRequest, Sampling
from evener.plugins.catalog import Catalog


class Listening(StepLimit):
    """Allows a fixed number of tokens, and keeps what it is asked and what it wraps."""

    def __init__(self, tokens: int = 64) -> None:
        self.tokens = tokens
        self.asked: list[tuple[int, list[str], list[str]]] = []
        self.wrapped: list[Executor] = []

    def allowed(self, most: int, running: Sequence[Any], waiting: Sequence[Any]) -> int:
        self.asked.append((most, [each.id for each in running], [each.id for each in waiting]))
        return min(most, self.tokens)

    def wrap(self, executor: Executor) -> Executor:
        self.wrapped.append(executor)
        return executor


def asks(name: str, prompt: int, answer: int) -> NewRequest:
    sampling = Sampling(temperature=0.0)
    return NewRequest(id=name, prompt=list(range(prompt)), max_tokens=answer, sampling=sampling)


def controller_over(device: SimulatedDevice, limit: StepLimit, depth: int) -> Controller:
    spec = StateSpec("full", (StateTensor("key", (1, 8), "float32"),))
    state = StateManager([spec], {kind.name: kind for kind in BUILTIN_KINDS}, 16, 2_000, prefix_cache=False)
    return Controller(Scheduler(state, 2, 2048, limit=limit), device, depth)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_limit_is_asked_before_each_step(depth: int) -> None:
    device, limit = SimulatedDevice(lambda plan: 0.05 + 0.001 * sum(plan.counts), background=True), Listening()
    controller = controller_over(device, limit, depth)
    controller.handle([asks("a", 100, 3), asks("b", 200, 3), asks("c", 10, 3)])
    while not controller.idle:
        controller.step()
    assert limit.asked[:3] == [(2048, [], ["a", "b", "c"]), (2048, ["a"], ["b", "c"]), (2048, ["a", "b"], ["c"])]
    assert max(sum(plan.counts) for plan in device.steps) == 64


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
        assert (controller.executor in made.wrapped) == (controller.scheduler.limit is made)
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
