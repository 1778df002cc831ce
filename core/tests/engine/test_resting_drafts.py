"""A draft model rests while nobody asks for drafts, and what it then proposes is as right as before.

A greedy model that drafts for itself is right each time, if its state as a draft model is that of the same tokens. So
each proposed token that is wrong shows state that was not computed, or was computed for other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from drafted_requests import requests
from evener_drafts.model import DraftModel, DraftRunner

from evener.config.schema import Config
from evener.contracts.generation.drafts import Drafts
from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener_conformance.reference.engine import RunResult
from evener_conformance.reference.executor import strict_controller
from evener_generation.drafting.model_drafter import ModelDrafter
from evener_generation.drafting.speculation import Speculation

LIMITS = {"reference.delay": True, "infer.max_reqs": 4, "infer.kv_memory": 2**24, "infer.step_tokens": 16}
TWO_LAYERS = {"num_hidden_layers": 2}
GREEDY = Sampling(temperature=0.0)


def drafted(config: Config, **infer: Any) -> Config:
    """With the model as its own draft model."""
    return replace(config, infer=replace(config.infer, draft_model=config.model, **infer))


class Switched(Speculation):
    """On for a few plans in a row, then off for some more, and so on."""

    def __init__(self, spans: Iterator[tuple[int, int]], samples: int = 8) -> None:
        super().__init__(ModelDrafter, length=4, max_samples=samples, vocabulary=10**9)
        self.plan = (each for on, off in spans for each in [True] * on + [False] * off)
        self.switches, self.was = 0, False

    def begin(self, running: Sequence[Any], joining: int) -> None:
        super().begin(running, joining)
        self.on = next(self.plan) and self.on
        self.switches, self.was = self.switches + (self.on != self.was), self.on


def spans(seed: int, off: int = 20) -> Iterator[tuple[int, int]]:
    """So many plans with drafts, then so many without."""
    random = Random(seed)
    while True:
        yield random.randint(2, 8), random.randint(1, off)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each step of a draft model computes."""
    sizes: list[int] = []
    execute = DraftRunner.execute
    monkeypatch.setattr(
        DraftRunner, "execute", lambda self, plan: (sizes.append(sum(plan.counts)), execute(self, plan))[1]
    )
    return sizes


def steps(controller: Controller, played: RunResult, count: int) -> None:
    for _ in range(count):
        played.see(controller.step())


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_draft_model_rests_and_is_right_again_as_often_as_before(
    make_lively: Any, play: Any, computed: list[int], depth: int
) -> None:
    config = make_lively("Llama", TWO_LAYERS, **LIMITS, **{"infer.depth": depth})
    messages = [NewRequest(id=f"r{i}", prompt=[7 + i, 9] * (4 + i), max_tokens=110, sampling=GREEDY) for i in range(2)]
    expected = play(strict_controller(config)[0], messages).tokens
    controller, _ = strict_controller(drafted(config))
    on, stats, played = Switched(iter([(10**6, 0)]), samples=15), controller.scheduler.stats, RunResult()

    def accepted(count: int) -> int:
        before = stats.accepted_tokens
        steps(controller, played, count)
        return stats.accepted_tokens - before

    controller.scheduler.drafts = on
    controller.handle(messages)
    steps(controller, played, 3)  # the prompts
    accepted(1 + depth)  # the first
    rate = accepted(4)
    controller.scheduler.drafts = Drafts()
    steps(controller, played, depth + 2)  # those in flight, and the few after which it rests
    computed.clear()
    assert accepted(16) == 0 and computed == []
    controller.scheduler.drafts = on
    # Each request lacks the state of some 15 tokens, and a step has room for 16.
    assert accepted(4) < rate and max(computed) == 16 and sum(computed) > 2 * 15
    accepted(depth)
    assert accepted(4) == rate == 4 * 2 * 4, "all requests are in each step with drafts, also with two plans in flight"
    while not controller.idle:
        steps(controller, played, 1)
    assert not played.dead and played.tokens == expected
    assert stats.accepted_tokens == stats.drafted_tokens


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_after_each_rest_all_is_right_with_cached_prefixes_forks_aborts_and_preemptions(
    make_lively: Any, play: Any, shrink_pool: Any, depth: int, seed: int
) -> None:
    config = make_lively("Llama", TWO_LAYERS, **LIMITS, **{"infer.depth": depth, "infer.block_size": 16})
    prompt = [*range(20, 61)]
    first = [
        NewRequest(id="r0", prompt=prompt, max_tokens=60, sampling=GREEDY),
        NewRequest(id="r1", prompt=prompt, max_tokens=50, sampling=GREEDY, fork_of="r0"),
        NewRequest(id="r2", prompt=[*prompt[:35], 3, 4], max_tokens=40, sampling=GREEDY, fork_of="r0"),
        NewRequest(id="gone", prompt=prompt[5:], max_tokens=60, sampling=GREEDY),
        NewRequest(id="late", prompt=prompt[9:], max_tokens=60, sampling=GREEDY),
    ]
    plain, aborts = strict_controller(config)[0], {"gone": 13}
    expected = play(plain, first, aborts=aborts)
    more = [NewRequest(id=f"more {m.id}", prompt=m.prompt + expected.tokens[m.id][:30], max_tokens=30, sampling=GREEDY)
            for m in first if m.id != "gone"]  # fmt: skip
    after = play(plain, more)
    controller, _ = strict_controller(drafted(config))
    shrink_pool(controller, 14 * len(controller.scheduler.state.specs))
    controller.scheduler.drafts = switched = Switched(spans(seed))
    found, again = play(controller, first, aborts=aborts), play(controller, more)
    assert found.reasons() == expected.reasons() and again.tokens == after.tokens
    assert {n: t for n, t in found.tokens.items() if n != "gone"} == {
        n: t for n, t in expected.tokens.items() if n != "gone"
    }
    stats = controller.scheduler.stats
    assert switched.switches > 8 and stats.forks and stats.preemptions and max(again.cached.values()) > 0
    assert stats.accepted_tokens == stats.drafted_tokens > 10
    assert controller.scheduler.state.pool.used == 0


def test_sampled_and_scored_tokens_are_those_without_a_draft_model(make_lively: Any, play: Any) -> None:
    config = make_lively("Llama", TWO_LAYERS, **LIMITS)
    expected = play(strict_controller(config)[0], requests())
    controller, _ = strict_controller(drafted(config))
    controller.scheduler.drafts = Switched(spans(4, off=6))
    assert play(controller, requests()).tokens == expected.tokens
    assert controller.scheduler.stats.accepted_tokens > 0


def test_two_ranks_rest_alike(make_lively: Any, play: Any) -> None:
    config = make_lively("Llama", {"num_hidden_layers": 1}, **{**LIMITS, "executor": "inline"})
    messages = [NewRequest(id=f"r{i}", prompt=[7 + i, 9] * (4 + i), max_tokens=60, sampling=GREEDY) for i in range(3)]
    expected = play(build_controller(config)[0], messages).tokens
    controller, _ = build_controller(drafted(config, tp_size=2))
    controller.scheduler.drafts = switched = Switched(spans(5, off=12))
    assert play(controller, messages).tokens == expected
    stats = controller.scheduler.stats
    assert switched.switches > 4 and stats.accepted_tokens == stats.drafted_tokens > 10
    controller.executor.close()


@pytest.mark.parametrize(
    "window", [6, pytest.param(20, marks=pytest.mark.slow), pytest.param(33, marks=pytest.mark.slow)]
)
def test_a_draft_model_with_windows_reads_no_block_that_was_freed(
    make_lively: Any, play: Any, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    config = make_lively("Gemma2", {"sliding_window": window}, **LIMITS, **{"infer.block_size": 16})
    messages = [NewRequest(id=f"r{i}", prompt=[7 + i, 9] * (9 + i), max_tokens=48, sampling=GREEDY) for i in range(4)]
    expected = play(strict_controller(config)[0], messages).tokens
    controller, _ = strict_controller(drafted(config))
    freed = watch_freed_blocks(controller, monkeypatch)
    controller.scheduler.drafts = Switched(iter([(10**6, 0)]))
    assert play(controller, messages).tokens == expected
    stats = controller.scheduler.stats
    assert freed == [] and stats.accepted_tokens == stats.drafted_tokens > 80


def watch_freed_blocks(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Slots and positions from which the draft model goes on, whose token reads a block that the request gave back."""
    found: list[tuple[int, int]] = []
    execute, scheduler = DraftRunner.execute, controller.scheduler

    def watched(self: DraftRunner, plan: Any) -> Any:
        tables = {r.slot: r.table for r in scheduler.running if r.table is not None}
        for slot, start in zip(plan.slots, plan.starts, strict=True):
            for spec, blocks in zip(scheduler.state.specs, tables[slot].blocks, strict=True):
                if not blocks[max(0, spec.first_attended(start)) // scheduler.state.block_size]:
                    found.append((slot, start))
        return execute(self, plan)

    monkeypatch.setattr(DraftRunner, "execute", watched)
    return found


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_a_draft_model_with_windows_proposes_nothing_that_it_cannot_know(
    make_lively: Any, play: Any, shrink_pool: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    config = make_lively("Gemma2", {"sliding_window": 20}, **LIMITS, **{"infer.block_size": 16})
    messages = [NewRequest(id=f"r{i}", prompt=[7 + i, 9] * (4 + i), max_tokens=60 + i, sampling=GREEDY)
                for i in range(5)]  # fmt: skip
    expected = play(strict_controller(config)[0], messages).tokens
    controller, executor = strict_controller(drafted(config))
    impatient(executor)
    shrink_pool(controller, controller.scheduler.state.slabs_for(90, controller.scheduler.step_tokens) * 2)
    freed = watch_freed_blocks(controller, monkeypatch)
    controller.scheduler.drafts = Switched(spans(seed, off=10))
    assert play(controller, messages).tokens == expected
    stats = controller.scheduler.stats
    assert freed == [] and stats.accepted_tokens == stats.drafted_tokens > 20


def impatient(executor: Any) -> DraftModel:
    """The draft model of a worker, which rests soon whatever its layers are."""
    model = executor.worker.drafter._drafter
    model._rest._patience = 2
    return model  # type: ignore[no-any-return]


def test_with_windows_a_short_text_is_caught_up_with_and_a_long_one_waits_for_no_drafts(
    make_lively: Any, play: Any, computed: list[int]
) -> None:
    config = make_lively("Gemma2", {"sliding_window": 20}, **LIMITS, **{"infer.block_size": 16})
    long = NewRequest(id="long", prompt=[7, 9] * 18, max_tokens=60, sampling=GREEDY)
    short = NewRequest(id="short", prompt=[8, 5], max_tokens=60, sampling=GREEDY)
    expected = play(strict_controller(config)[0], [long, short]).tokens
    controller, executor = strict_controller(drafted(config))
    impatient(executor)
    stats, played = controller.scheduler.stats, RunResult()
    controller.scheduler.drafts = Drafts()
    controller.handle([long, short])
    steps(controller, played, 30)
    assert len(played.tokens["short"]) < 32, "no block of its window was freed"
    controller.scheduler.drafts = Switched(iter([(10**6, 0)]))
    computed.clear()
    steps(controller, played, 10)
    asked = {r.id: text for r in controller.scheduler.running
             if (text := controller.scheduler.drafts._texts.get(r)) is not None}  # fmt: skip
    assert asked["long"].lost and not asked["short"].lost
    while not controller.idle:
        steps(controller, played, 1)
    assert not played.dead and played.tokens == expected and sum(computed) > 0
    assert stats.accepted_tokens == stats.drafted_tokens > 20
