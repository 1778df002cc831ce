"""Speculative decoding of requests that follow a grammar: the tokens of a run without drafts, in fewer steps, whoever
proposes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from evener_constraints.compiler import GrammarCompiler
from evener_constraints.masks import GrammarMasks
from knowing_drafter import KnowingDrafter
from step_grammar import STEPS, VOCAB, StepMatcher, Steps, follows

from evener.contracts.generation.drafter import BY_WORKER, Drafter
from evener.contracts.generation.drafts import NOT_YET
from evener.contracts.grammar.library import GrammarSpec, Matcher
from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.engine.wire.plan import Order, Plan, StepResult
from evener_conformance.reference.executor import strict_controller
from evener_generation.drafting.grammar_drafter import GrammarDrafter
from evener_generation.drafting.model_drafter import ModelDrafter
from evener_generation.drafting.speculation import Speculation

SHAPE = {"num_hidden_layers": 1, "vocab_size": VOCAB}
LIMITS = {"reference.delay": True, "infer.max_reqs": 4, "infer.kv_memory": 2**24, "infer.step_tokens": 16}
SHORT = GrammarSpec(kind="regex", text="short")
GREEDY = Sampling(temperature=0.0)


def requests() -> list[NewRequest]:
    """With a grammar and without, greedy and random; the last is another sample of the first."""
    asked = {
        "greedy": Sampling(temperature=0.0, grammar=STEPS),
        "free": GREEDY,
        "warm": Sampling(temperature=0.9, top_p=0.9, top_k=20, seed=5, grammar=STEPS),
        "scored": Sampling(temperature=0.0, logprobs=2, repetition_penalty=1.3, grammar=STEPS),
        "sample": Sampling(temperature=0.7, seed=9, grammar=STEPS),
    }
    return [
        NewRequest(id=name, prompt=[9 + at % 4, *range(20, 40)], max_tokens=20 + at, sampling=sampling,
                   fork_of="greedy" if name == "sample" else "")
        for at, (name, sampling) in enumerate(asked.items())
    ]  # fmt: skip


def held(controller: Controller, drafter: type[Drafter] | None = None) -> Controller:
    """With the grammars of the tests, and with drafts in every step that can have some."""
    controller.scheduler.grammars = GrammarMasks(GrammarCompiler(Steps))
    if drafter is not None:
        controller.scheduler.drafts = Speculation(drafter, 4, max_samples=12, vocabulary=VOCAB)
    return controller


@pytest.fixture
def opened(make_lively: Any) -> Callable[..., Any]:
    """Makes the configuration of a model, which may be its own draft model."""

    def make(depth: int = 2, own: bool = False, **infer: Any) -> Any:
        config = make_lively("Llama", SHAPE, **LIMITS, **{"infer.depth": depth})
        draft = config.model if own else None
        return dataclasses.replace(config, infer=dataclasses.replace(config.infer, draft_model=draft, **infer))

    return make


def plans(controller: Controller) -> list[Plan]:
    """The plans that a controller will submit."""
    found: list[Plan] = []
    submit = controller.executor.submit

    def noted(order: Order) -> None:
        found.extend([order] if isinstance(order, Plan) else [])
        submit(order)

    controller.executor.submit = noted  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_tokens_are_the_same_with_drafts_and_without_and_no_forbidden_draft_is_computed(
    opened: Any, play: Any, depth: int
) -> None:
    controller = held(strict_controller(opened(depth))[0])
    plain = play(controller, requests())
    assert set(plain.reasons().values()) == {"length"}, plain.ends
    steps = controller.scheduler.stats.steps
    KnowingDrafter.answers = [each.prompt + plain.tokens[each.id] for each in requests()]
    controller = held(strict_controller(opened(depth))[0], KnowingDrafter)
    submitted = plans(controller)
    found = play(controller, requests())
    assert found.tokens == plain.tokens
    assert all(follows(found.tokens[name]) for name in ("greedy", "warm", "scored", "sample"))
    stats = controller.scheduler.stats
    assert 0 < stats.accepted_tokens < stats.drafted_tokens and stats.steps < steps
    held_to = [
        each.ids for plan in submitted for each in plan.drafts if each.row in {plan.samples[i] for i in plan.masked}
    ]
    assert held_to, "no request with a grammar had drafts"
    assert all(1 <= after - before <= 3 for ids in held_to for before, after in pairwise(ids))
    assert controller.scheduler.state.pool.used == 0


class Stubborn(Drafter):
    """Proposes what no grammar of the tests allows."""

    asked = 0

    def extend(self, tokens: Any) -> None: ...

    def propose(self, count: int) -> list[int]:
        type(self).asked += 1
        return [0] * count


def test_proposals_that_a_grammar_forbids_are_not_computed_and_asked_for_less_and_less(opened: Any, play: Any) -> None:
    plain = play(held(strict_controller(opened())[0]), requests()[:1]).tokens
    controller = held(strict_controller(opened())[0], Stubborn)
    Stubborn.asked = 0
    submitted = plans(controller)
    assert play(controller, requests()[:1]).tokens == plain
    assert not any(plan.drafts for plan in submitted) and controller.scheduler.stats.drafts == 0
    assert 0 < Stubborn.asked < 6


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_proposals_of_a_draft_model_are_held_to_the_grammar(opened: Any, play: Any, depth: int) -> None:
    plain = play(held(strict_controller(opened(depth))[0]), requests())
    controller = held(strict_controller(opened(depth, own=True))[0], ModelDrafter)
    submitted = plans(controller)
    found = play(controller, requests())
    assert found.tokens == plain.tokens and found.reasons() == plain.reasons()
    stats = controller.scheduler.stats
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert any(BY_WORKER in each.ids for plan in submitted if plan.masked for each in plan.drafts)
    assert controller.scheduler.state.pool.used == 0


def test_a_text_with_a_grammar_goes_on_while_its_draft_model_computes_what_it_missed(opened: Any, play: Any) -> None:
    plain = play(held(strict_controller(opened())[0]), requests()).tokens
    controller = held(strict_controller(opened(own=True))[0], ModelDrafter)
    scheduler, answers = controller.scheduler, list[int]()
    begin, retire = scheduler.drafts.begin, scheduler.retire

    def now_and_then(running: Sequence[Any], joining: int) -> None:
        begin(running, joining)
        scheduler.drafts.on = scheduler.stats.steps % 20 > 11

    def noted(result: StepResult) -> Any:
        answers.extend(id for ids in result.drafts for id in ids)
        return retire(result)

    scheduler.drafts.begin, scheduler.retire = now_and_then, noted  # type: ignore[method-assign]
    assert play(controller, requests()).tokens == plain
    assert NOT_YET in answers and max(answers) > 0 and scheduler.stats.accepted_tokens > 0


def test_two_ranks_hold_the_proposals_of_their_draft_model_to_the_grammar(opened: Any, play: Any) -> None:
    def alike(**infer: Any) -> Any:
        return dataclasses.replace(opened(**infer), executor="inline")

    plain = play(held(build_controller(alike())[0]), requests()).tokens
    controller = held(build_controller(alike(own=True, tp_size=2))[0], ModelDrafter)
    assert play(controller, requests()).tokens == plain
    assert controller.scheduler.stats.accepted_tokens > 0
    controller.executor.close()


@pytest.mark.parametrize("own", [False, True])
def test_a_text_that_reaches_a_limit_behind_right_drafts_ends_as_without_them(
    opened: Any, play: Any, own: bool
) -> None:
    message = NewRequest(id="r", prompt=[9, 20, 21], max_tokens=20, sampling=Sampling(temperature=0.0, grammar=SHORT))
    plain = play(held(strict_controller(opened())[0]), [message])
    assert plain.reasons() == {"r": "error"}
    KnowingDrafter.answers = [[*message.prompt, *plain.tokens["r"], *range(plain.tokens["r"][-1] + 1, 99)]]
    controller = held(strict_controller(opened(own=own))[0], ModelDrafter if own else KnowingDrafter)
    found = play(controller, [message])
    assert found.tokens == plain.tokens and found.reasons() == plain.reasons()
    assert "a limit was reached" in str(found.ends["r"][0].error)
    assert controller.scheduler.stats.drafted_tokens > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_token_among_right_drafts_ends_a_text_with_a_grammar(opened: Any, play: Any, depth: int) -> None:
    message = requests()[0]
    whole = play(held(strict_controller(opened(depth))[0]), [message]).tokens[message.id]
    KnowingDrafter.answers = [message.prompt + whole]
    stopped = NewRequest(
        id="stop", prompt=message.prompt, max_tokens=20, sampling=message.sampling, stop_token_ids=[whole[6]]
    )
    controller = held(strict_controller(opened(depth))[0], KnowingDrafter)
    found = play(controller, [stopped])
    assert found.tokens["stop"] == whole[:7] and found.reasons() == {"stop": "stop"}
    assert controller.scheduler.stats.accepted_tokens > 0


def test_a_preempted_text_with_a_grammar_gets_right_drafts_again(opened: Any, play: Any, shrink_pool: Any) -> None:
    plain = play(held(strict_controller(opened())[0]), requests())
    KnowingDrafter.answers = [each.prompt + plain.tokens[each.id] for each in requests()]
    controller = held(strict_controller(opened())[0], KnowingDrafter)
    shrink_pool(controller, 9)
    assert play(controller, requests()).tokens == plain.tokens
    stats = controller.scheduler.stats
    assert stats.preemptions > 0 and stats.accepted_tokens > 0


class RailMatcher(StepMatcher):
    """Behind a multiple of 4 an id is 1 to 3 higher, behind others 1. ``wrong``: what it forces is only allowed."""

    wrong = False

    def copy(self) -> Matcher:
        found = type(self)(self.last, self.most)
        found.wrong = self.wrong
        return found

    def mask(self) -> bytes:
        if self.last % 4 == 0:
            return super().mask()
        bits = np.zeros(VOCAB, dtype=np.uint8)
        bits[self.last + 1] = 1
        return bytes(np.packbits(bits, bitorder="little"))

    def forced(self) -> list[int]:
        if self.wrong:
            return [self.last + 3] if self.last % 4 == 0 else []
        return list(range(self.last + 1, self.last + 5 - self.last % 4)) if self.last % 4 else []


class Rails(Steps):
    matcher = RailMatcher

    def compile(self, spec: GrammarSpec) -> Matcher:
        return self.matcher()


class WrongRails(Rails):
    matcher = type("_Wrong", (RailMatcher,), {"wrong": True})


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(("library", "right"), [(Rails, True), (WrongRails, False)])
def test_forced_tokens_are_drafts_that_change_no_token_and_save_steps(
    opened: Any, play: Any, depth: int, library: type[Steps], right: bool
) -> None:
    def ran(**infer: Any) -> tuple[Any, Controller]:
        controller, _ = build_controller(opened(depth, **infer))
        controller.scheduler.grammars = GrammarMasks(GrammarCompiler(library))
        if infer:
            controller.scheduler.drafts = Speculation(GrammarDrafter, 4, max_samples=12, vocabulary=VOCAB)
            controller.scheduler.drafts.forced = controller.scheduler.grammars.forced
        return play(controller, requests()), controller

    (plain, without), (found, controller) = ran(), ran(drafter="grammar")
    assert found.tokens == plain.tokens and found.reasons() == plain.reasons()
    for mine, theirs in zip(found.logprobs.values(), plain.logprobs.values(), strict=True):
        assert [each.ids for each in mine] == [each.ids for each in theirs]
    stats = controller.scheduler.stats
    if right:
        assert stats.accepted_tokens == stats.drafted_tokens > 0
        assert stats.steps < without.scheduler.stats.steps
    else:
        assert stats.drafted_tokens > stats.accepted_tokens
    assert controller.scheduler.state.pool.used == 0


def test_the_drafter_grammar_is_chosen_by_its_key_and_asks_the_engine_s_grammars(opened: Any) -> None:
    controller, _ = build_controller(opened(drafter="grammar"))
    scheduler = controller.scheduler
    assert isinstance(scheduler.drafts, Speculation) and scheduler.drafts.forced == scheduler.grammars.forced
