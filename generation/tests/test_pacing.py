"""Answers go on evenly while prompts keep up, whatever comes. The device and its clock are simulated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from evener_pacing.costs import StepCosts, StepWork
from evener_pacing.pace import LEAST_TOKENS, PacedSteps, paced_steps
from evener_pacing.timed_executor import TimedExecutor, TimedLimit
from timed_device import SimulatedDevice

from evener.builtin.kinds import BUILTIN_KINDS
from evener.config import from_overrides
from evener.contracts.state import StateSpec, StateTensor
from evener.engine.controller.controller import Controller
from evener.engine.controller.scheduler import Scheduler
from evener.engine.controller.state import StateManager
from evener.engine.wire.messages import Abort, Finished, NewRequest, Sampling, Tokens
from evener.engine.wire.plan import DraftedTokens, Plan
from evener.errors import ConfigError

TARGET, RATIO = 0.25, 2.0


@dataclass(frozen=True)
class Device:
    """Seconds that work takes: a card's with a model of 8 billion parameters, ten times as much at once."""

    fixed: float = 0.005
    read: float = 4e-8
    mixed: float = 0.002
    token: float = 2.5e-5
    attend: float = 1.2e-9

    def seconds(self, plan: Plan) -> float:
        work = StepWork.of(plan)
        prompts = self.mixed + self.token * work.tokens + self.attend * work.pairs if work.tokens else 0.0
        return self.fixed + self.read * work.context + prompts


class Fixed(TimedLimit):
    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def allowed(self, most: int, running: Sequence[object], waiting: Sequence[object]) -> int:
        return min(most, self.tokens)


@dataclass
class Load:
    """What came of requests that arrive at random, after the first seconds."""

    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    events: dict[str, list[str]] = field(default_factory=dict)
    tokens: float = 0.0

    @property
    def unevenness(self) -> float:
        ordered = sorted(self.gaps)
        return ordered[int(0.99 * len(ordered))] / ordered[len(ordered) // 2]


def controller_over(device: SimulatedDevice, limit: TimedLimit, budget: int = 8192) -> Controller:
    spec = StateSpec("full", (StateTensor("key", (1, 8), "float32"),))
    state = StateManager([spec], {kind.name: kind for kind in BUILTIN_KINDS}, 16, 45_000, prefix_cache=False)
    return Controller(Scheduler(state, 256, budget, limit=limit), TimedExecutor(device, limit, device.clock), 2)


def asks(name: str, prompt: int, answer: int) -> NewRequest:
    return NewRequest(id=name, prompt=[1] * prompt, max_tokens=answer, sampling=Sampling(temperature=0.0))


def under_load(
    limit: TimedLimit, rate: float, seconds: float, waiting: int = 32, aborted: float = 0.0, skip: float = 8.0
) -> Load:
    """Requests with prompts of 200 to 8,000 tokens; those that find ``waiting`` others waiting are refused. So many of
    the others are ``aborted``, at random."""
    made, noise = random.Random(5), random.Random(6)
    kind = Device()
    card = SimulatedDevice(lambda plan: kind.seconds(plan) * noise.uniform(0.97, 1.03))
    controller, load = controller_over(card, limit), Load()
    last: dict[str, float] = {}
    arrived: dict[str, float] = {}
    due = made.expovariate(rate)
    while due < seconds or not controller.idle:
        while due < seconds and due <= card.now:
            if len(controller.scheduler.waiting) < waiting:
                name = str(len(arrived))
                arrived[name], load.events[name] = due, []
                controller.handle([asks(name, made.randint(200, 8000), made.randint(32, 224))])
            due += made.expovariate(rate)
        if controller.idle:
            card.now = max(card.now, due)
            continue
        before = controller.scheduler.stats.computed_tokens
        events = controller.step()
        inside = skip < card.now < seconds
        load.tokens += (controller.scheduler.stats.computed_tokens - before) * inside
        if aborted and made.random() < aborted and load.events:
            events += controller.handle([Abort(id=made.choice(list(load.events)))])
        for event in events:
            if isinstance(event, Tokens):
                gap = card.now - last.get(event.id, arrived[event.id])
                if inside:
                    (load.gaps if event.id in last else load.firsts).append(gap)
                last[event.id] = card.now
            elif isinstance(event, Finished):
                load.events[event.id].append(event.reason)
    return load


#: Requests a second, of which the card above can compute about 7.8.
LOADS = (2.0, 4.0, 6.0, 7.4, 64.0)


@pytest.mark.slow
@pytest.mark.parametrize("rate", LOADS)
def test_tokens_come_evenly_and_as_many_as_with_the_best_fixed_budget(rate: float) -> None:
    paced = under_load(PacedSteps(TARGET, RATIO), rate, 40)
    best = max(under_load(Fixed(tokens), rate, 40).tokens for tokens in (1024, 2048, 8192))
    assert paced.unevenness < 3, "the slowest hundredth of the tokens, beside the usual one"
    assert paced.tokens > 0.95 * best
    assert all(events == ["length"] for events in paced.events.values()), "nobody starves"


def test_a_whole_budget_is_uneven_and_a_pace_is_not() -> None:
    whole, paced = (under_load(limit, 6.0, 16, skip=5.0) for limit in (Fixed(8192), PacedSteps(TARGET, RATIO)))
    assert whole.unevenness > 10 > 3 > paced.unevenness
    assert paced.tokens > 0.95 * whole.tokens


@pytest.mark.slow
def test_with_a_small_fixed_budget_prompts_fall_behind() -> None:
    whole, small = (under_load(Fixed(tokens), 6.0, 30) for tokens in (8192, 512))
    assert sorted(small.firsts)[len(small.firsts) // 2] > 4 * sorted(whole.firsts)[len(whole.firsts) // 2]


def test_every_request_of_a_load_with_aborts_ends_once() -> None:
    load = under_load(PacedSteps(TARGET, RATIO), 20.0, 6, aborted=0.1)
    assert {len(events) for events in load.events.values()} == {1}
    assert {events[0] for events in load.events.values()} == {"length", "abort"}


@pytest.mark.slow
def test_on_a_slow_device_prompts_have_at_least_a_third_of_the_time() -> None:
    # A decode step alone takes more than the target.
    slow = Device(fixed=0.4, read=0.0, mixed=0.0, token=0.01, attend=0.0)
    card = SimulatedDevice(slow.seconds)
    controller = controller_over(card, PacedSteps(TARGET, RATIO))
    controller.handle([asks(f"r{i}", 8, 400) for i in range(8)])
    controller.handle([asks("long", 1500, 4)])
    while controller.scheduler.running or not controller.idle:
        if not any(r.id == "long" for r in controller.scheduler.running + controller.scheduler.waiting):
            break
        controller.step()
    mixed = [plan for plan in card.steps if StepWork.of(plan).tokens and StepWork.of(plan).decoding]
    assert all(StepWork.of(plan).tokens >= LEAST_TOKENS for plan in mixed[2:-1])
    assert card.now < 3.2 * 1500 * slow.token


def test_a_prompt_that_holds_up_no_answer_takes_the_target() -> None:
    card = SimulatedDevice(Device(token=1e-4, attend=0.0).seconds)
    controller = controller_over(card, PacedSteps(TARGET, RATIO))
    controller.handle([asks("long", 30_000, 1)])
    while not controller.idle:
        controller.step()
    full = [card.seconds(plan) for plan in card.steps]
    assert 0.9 * TARGET < sorted(full)[len(full) // 2] <= 1.02 * TARGET
    assert [sum(plan.counts) for plan in card.steps][:4] == [256, 256, 512, 512], "at most twofold, two in flight"


def test_costs_are_those_of_the_device_whatever_the_mix_of_steps_and_a_slow_step_changes_little() -> None:
    made, costs, device = random.Random(1), StepCosts(), Device()
    for index in range(600):
        rows = [(made.randrange(200, 8000), 1) for _ in range(made.randrange(1, 60))]
        if made.random() < 0.1:
            rows.append((made.randrange(6000), made.randrange(32, 4000)))
        plan = Plan(id=index, starts=[start for start, _ in rows], counts=[count for _, count in rows])
        costs.record(StepWork.of(plan), device.seconds(plan) * (50 if index == 590 else 1))
    decode, token = device.fixed + device.read * 100_000, device.token + device.attend * 3000
    assert costs.decode(100_000) == pytest.approx(decode, rel=0.05)
    assert costs.token(2000, 2000) == pytest.approx(token, rel=0.05)
    seconds = decode + device.mixed + 2000 * token
    assert costs.tokens(seconds, 100_000, 2000) == pytest.approx(2000, rel=0.08)


@pytest.mark.parametrize("token, attend", [(2.5e-5, 5e-8), (2.5e-5, 0.0), (0.0, 5e-8)])
@pytest.mark.parametrize("start", [0, 3000])
def test_so_many_tokens_take_the_seconds_also_where_most_of_them_is_attention(
    token: float, attend: float, start: int
) -> None:
    made, costs, device = random.Random(1), StepCosts(), Device(read=0.0, mixed=0.0, token=token, attend=attend)
    for index in range(400):
        plan = Plan(id=index, starts=[made.randrange(4000), 0], counts=[made.randrange(2, 3000), 1])
        costs.record(StepWork.of(plan), device.seconds(plan))
    count = costs.tokens(TARGET, 0, start)
    assert device.seconds(Plan(id=0, starts=[start], counts=[round(count)])) == pytest.approx(TARGET, rel=0.02)


def test_costs_follow_a_device_that_becomes_slower() -> None:
    costs = StepCosts()
    for index in range(400):
        plan = Plan(id=index, starts=[1000, 0], counts=[1, 64 + 7 * (index % 50)])
        costs.record(StepWork.of(plan), Device().seconds(plan) * (1 if index < 200 else 3))
    expected = 3 * (Device().fixed + Device().mixed + 256 * Device().token)
    assert costs.started(1000) + 256 * costs.token(0, 256) == pytest.approx(expected, rel=0.1)


def test_rows_with_drafts_decode_and_their_drafts_cost_what_prompt_tokens_do() -> None:
    plan = Plan(id=0, starts=[10, 20, 30], counts=[1, 5, 100], drafts=[DraftedTokens(1, [1, 2, 3, 4])])
    assert StepWork.of(plan) == StepWork(context=30, decoding=2, tokens=104, pairs=100 * 80)


def test_without_prompts_drafts_have_the_whole_budget() -> None:
    assert PacedSteps(TARGET, RATIO).allowed(8192, [], []) == 8192


def test_the_pace_is_chosen_and_its_ratio_must_leave_prompts_time() -> None:
    keys = {"infer.step_target": 0.5, "infer.pp_size": 2, "generation.step_limit": "pace"}
    assert paced_steps(from_overrides("m", {}), 8) is None
    for ratio, more in ((2, {}), (4, {"generation.step_ratio": 4})):
        made = paced_steps(from_overrides("m", {**keys, **more}), 8)
        assert isinstance(made, PacedSteps) and made.pace == ratio
    with pytest.raises(ConfigError, match=r"step_ratio=1 leaves prompts no time; set it above 1"):
        paced_steps(from_overrides("m", {**keys, "generation.step_ratio": 1}), 8)
