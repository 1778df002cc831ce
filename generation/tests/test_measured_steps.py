"""Steps of a server stay near their target time, and an explicit budget means what it says. Clocks are simulated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evener_pacing.measured import LEAST_TOKENS, MeasuredSteps, measured_steps
from evener_pacing.pace import PacedSteps
from evener_pacing.timed_executor import TimedExecutor, TimedLimit
from timed_device import SimulatedDevice

from evener.builtin.kinds import BUILTIN_KINDS
from evener.config import from_overrides
from evener.contracts.state import StateSpec, StateTensor
from evener.engine.batching.step_limit import StepLimit, limit_steps
from evener.engine.controller.controller import Controller
from evener.engine.controller.scheduler import Scheduler
from evener.engine.controller.state import StateManager
from evener.engine.processes.start import build_controller
from evener.engine.wire.media import StepMedia
from evener.engine.wire.messages import Finished, NewRequest, Sampling, Tokens
from evener.engine.wire.plan import Plan, StepResult
from evener.errors import ConfigError
from evener_conformance.reference.engine import small_config

TARGET = 0.25
#: Seconds of a step without tokens.
FIXED = 0.05


def per_token(seconds: float) -> Callable[[Plan], float]:
    return lambda plan: FIXED + seconds * sum(plan.counts)


def asks(name: str, prompt: int, answer: int) -> NewRequest:
    sampling = Sampling(temperature=0.0)
    return NewRequest(id=name, prompt=list(range(prompt)), max_tokens=answer, sampling=sampling)


def controller_over(
    device: SimulatedDevice, limit: TimedLimit, depth: int = 2, budget: int = 2048, max_requests: int = 64
) -> Controller:
    spec = StateSpec("full", (StateTensor("key", (1, 8), "float32"),))
    state = StateManager([spec], {kind.name: kind for kind in BUILTIN_KINDS}, 16, 20_000, prefix_cache=False)
    scheduler = Scheduler(state, max_requests, budget, limit=limit)
    return Controller(scheduler, TimedExecutor(device, limit, device.clock), depth)


def streams(device: SimulatedDevice, limit: TimedLimit, depth: int = 2, count: int = 64) -> list[float]:
    """Run streams that start one after another, as the first ends its prompt. Returns the seconds between the tokens of
    each, sorted."""
    controller = controller_over(device, limit, depth)
    controller.handle([asks(f"r{i}", 700, 40) for i in range(count)])
    last: dict[str, float] = {}
    gaps = []
    while not controller.idle:
        for event in controller.step():
            if isinstance(event, Tokens):
                if event.id in last:
                    gaps.append(device.now - last[event.id])
                last[event.id] = device.now
    assert len(gaps) == 39 * count
    return sorted(gaps)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_running_answers_get_their_tokens_within_the_target_while_prompts_are_computed(
    background: bool, depth: int
) -> None:
    slow = SimulatedDevice(per_token(0.001), background)
    before = streams(slow, TimedLimit(), depth)
    assert before[int(0.97 * len(before))] > 2.0, "2,048 tokens take two seconds"
    limited = SimulatedDevice(per_token(0.001), background)
    gaps = streams(limited, MeasuredSteps(TARGET, 64), depth)
    # One token of a synchronous device may be read a step late.
    assert gaps[int(0.99 * len(gaps))] <= 1.05 * TARGET * (1 if background or depth == 1 else 2)
    assert max(limited.seconds(plan) for plan in limited.steps) <= 1.05 * TARGET
    # The fixed time of a step is paid more often; nothing else is lost.
    assert limited.now - FIXED * len(limited.steps) == pytest.approx(slow.now - FIXED * len(slow.steps))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("start", [1e-5, 1e-4, 1e-3])
def test_the_limit_follows_the_speed_of_the_device(start: float, depth: int) -> None:
    speed = {"now": start}
    device = SimulatedDevice(lambda plan: FIXED + speed["now"] * sum(plan.counts), background=True)
    limit = MeasuredSteps(TARGET, 4)
    controller = controller_over(device, limit, depth, budget=8192)
    for factor in (1, 4, 0.25):
        speed["now"] = start * factor
        controller.handle([asks(f"r{factor}", 60_000 if start * factor > 1e-4 else 200_000, 1)])
        while not controller.idle:
            controller.step()
        best = min(8192.0, max(LEAST_TOKENS, (TARGET - FIXED) / speed["now"]))
        assert 0.85 * best - 64 <= limit.allowed(8192, [], []) <= best + 1


def test_a_step_that_was_slow_for_another_reason_costs_a_few_small_steps() -> None:
    slow_plan = 40
    device = SimulatedDevice(lambda plan: 3.0 if plan.id == slow_plan else FIXED + 1e-4 * sum(plan.counts), True)
    controller = controller_over(device, MeasuredSteps(TARGET, 4))
    controller.handle([asks("long", 150_000, 1)])
    while not controller.idle:
        controller.step()
    counts = [sum(plan.counts) for plan in device.steps]
    assert counts[slow_plan + 2] == LEAST_TOKENS
    assert counts[slow_plan + 15] == counts[slow_plan] >= 1900


def test_every_running_request_gets_its_token_however_slow_a_step_is() -> None:
    device = SimulatedDevice(per_token(1.0), background=True)
    controller = controller_over(device, MeasuredSteps(TARGET, 200), max_requests=200)
    controller.handle([asks(f"r{i}", 1, 4) for i in range(200)])
    events: list[Any] = []
    while not controller.idle:
        events += controller.step()
    assert [len(plan.counts) for plan in device.steps] == [200] * 4
    assert sum(isinstance(event, Finished) for event in events) == 200


def test_the_limit_never_exceeds_the_budget_and_no_budget_is_raised_to_it() -> None:
    limit = MeasuredSteps(TARGET, 4)
    for _ in range(20):
        limit.record(Plan(id=0, counts=[limit.allowed(1000, [], [])]), 0.001)
    assert (limit.allowed(1000, [], []), limit.allowed(7, [], [])) == (1000, 7)


def test_a_step_that_encodes_media_says_nothing_about_tokens() -> None:
    device = SimulatedDevice(lambda plan: 1.0, background=True)
    limit = MeasuredSteps(TARGET, 4)
    limit.record(Plan(id=0, counts=[4096]), TARGET)
    executor = TimedExecutor(device, limit, device.clock)
    executor.submit(Plan(id=0, counts=[4096], media=StepMedia([], [], [])))
    executor.read()
    assert limit.allowed(8192, [], []) == 4096
    executor.submit(Plan(id=1, counts=[4096]))
    executor.read()
    assert limit.allowed(8192, [], []) == 1024


def test_a_step_that_waits_for_masks_is_measured_once_with_both_waits() -> None:
    device = SimulatedDevice(lambda plan: 0.0, background=True)
    limit = MeasuredSteps(TARGET, 4)
    limit.record(Plan(id=0, counts=[4096]), TARGET)
    executor = TimedExecutor(device, limit, device.clock)
    executor.submit(Plan(id=0, counts=[4096]))
    device._done = deque([(0.5, StepResult(plan=0, drafts=[[1]])), (1.0, StepResult(plan=0, ids=[1, 2]))])
    assert executor.read().proposed and limit.allowed(8192, [], []) == 4096
    assert not executor.read().proposed
    assert limit.allowed(8192, [], []) == 1024, "4,096 tokens took a second"


def test_steps_of_a_server_are_measured_unless_the_pace_is_chosen() -> None:
    def limit(streaming: bool, **keys: Any) -> tuple[type, type]:
        limit = limit_steps(from_overrides("m", keys), 8, streaming)
        return type(limit), type(limit.wrap(SimulatedDevice(per_token(1.0), background=True)))

    measured, fixed = (MeasuredSteps, TimedExecutor), (StepLimit, SimulatedDevice)
    assert limit(True) == measured
    assert limit(True, **{"generation.step_limit": "measured"}) == measured
    assert limit(True, **{"generation.step_limit": "pace"}) == (PacedSteps, TimedExecutor)
    assert limit(False) == fixed, "a batch gets the same steps in every run"
    assert limit(True, **{"infer.step_tokens": 64}) == fixed, "an explicit budget means what it says"
    assert limit(True, **{"infer.step_target": 0}) == fixed


def test_the_engine_of_a_server_has_the_limit_that_is_chosen(tmp_path: Path) -> None:
    for name, made in (("measured", MeasuredSteps), ("pace", PacedSteps)):
        keys: dict[str, Any] = {"backend": "cpu", "infer.step_tokens": "auto", "generation.step_limit": name}
        controller, _ = build_controller(small_config(tmp_path / name, **keys), streaming=True)
        controller.handle([asks(name, 30, 4)])
        while not controller.idle:
            controller.step()
        controller.close()
        assert type(controller.scheduler.limit) is made and controller.scheduler.stats.computed_tokens >= 33


def test_stages_share_the_target_and_as_many_tokens_as_requests_are_always_allowed() -> None:
    made = measured_steps(from_overrides("m", {"infer.step_target": 1.0, "infer.pp_size": 2}), 300)
    assert isinstance(made, MeasuredSteps) and made.allowed(8192, [], []) == 300
    made.record(Plan(id=0, counts=[4096]), 0.5)
    assert made.allowed(8192, [], []) == 4096
    made.record(Plan(id=1, counts=[4096]), 1.0)
    assert made.allowed(8192, [], []) == 2048


def test_a_limit_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"step_limit=fast is not a value .* takes measured or pace"):
        from_overrides("m", {"generation.step_limit": "fast"})
