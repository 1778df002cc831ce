"""Grammars in the engine, with a small grammar library of the test's own: the same tokens at every depth, nobody waits
for another's grammar, and each text keeps its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from evener_constraints.compiler import GrammarCompiler
from evener_constraints.masks import GrammarMasks
from step_grammar import STEPS, VOCAB, Steps, follows

from evener.contracts.grammar.library import GrammarSpec
from evener.engine.controller.controller import Controller
from evener.engine.controller.grammars import Grammars
from evener.engine.wire.messages import NewRequest, Sampling
from evener.engine.wire.plan import Order, StepMasks
from evener_conformance.reference.executor import strict_controller

ONE_LAYER = {"num_hidden_layers": 1}
DELAYED = {"reference.delay": True}
SHORT = GrammarSpec(kind="regex", text="short")
WARM = Sampling(temperature=1.0, seed=5, grammar=STEPS)


def request(name: str, sampling: Sampling = WARM, **fields: Any) -> NewRequest:
    start = 3 + 5 * int(name[-1])
    return NewRequest(
        id=name, **{"prompt": list(range(start, start + 12)), "max_tokens": 24, "sampling": sampling, **fields}
    )


@pytest.fixture
def opened(make_config: Any, shrink_pool: Any) -> Callable[..., tuple[Controller, Steps]]:
    """A controller of some depth, with ``Steps``."""

    def make(depth: int = 2, blocks: int | None = None) -> tuple[Controller, Steps]:
        config = make_config("Llama", {**ONE_LAYER, "vocab_size": VOCAB}, **DELAYED, **{"infer.depth": depth})
        controller, _ = strict_controller(config)
        if blocks is not None:
            shrink_pool(controller, blocks)
        library = Steps()
        controller.scheduler.grammars = GrammarMasks(GrammarCompiler(lambda: library))
        return controller, library

    return make


def mixed() -> list[NewRequest]:
    """Requests with and without a grammar, greedy and random."""
    greedy = Sampling(temperature=0.0, grammar=STEPS)
    return [request("r0"), request("free1", Sampling(temperature=0.0)), request("r2", greedy), request("r3")]


def test_every_depth_gives_the_same_tokens_and_they_follow_the_grammar(opened: Any, play: Any) -> None:
    played = [play(opened(depth)[0], mixed()).tokens for depth in (1, 2, 3)]
    assert played[0] == played[1] == played[2]
    assert all(follows(played[0][name]) and len(played[0][name]) == 24 for name in ("r0", "r2", "r3"))
    assert not follows(played[0]["free1"]), "a row without a grammar had a mask"


def test_a_text_that_was_preempted_goes_on_where_it_was(opened: Any, play: Any) -> None:
    roomy = play(opened()[0], mixed())
    controller, _ = opened(blocks=7)
    assert play(controller, mixed()).tokens == roomy.tokens
    assert controller.scheduler.stats.preemptions > 0


def test_each_of_several_answers_has_a_state_of_its_own(opened: Any, play: Any) -> None:
    first = request("r0")
    others = [{"id": f"r0-{i}", "fork_of": "r0", "sampling": msgspec.structs.replace(WARM, seed=i)} for i in range(3)]
    samples = [first, *(msgspec.structs.replace(first, **fields) for fields in others)]
    tokens = play(opened()[0], samples).tokens
    assert all(follows(ids) and len(ids) == 24 for ids in tokens.values())
    assert len({tuple(ids) for ids in tokens.values()}) == 4


def test_nobody_waits_for_a_grammar_that_is_being_compiled(opened: Any) -> None:
    controller, library = opened()
    controller.handle(
        [request("r0", Sampling(grammar=GrammarSpec(kind="regex", text="slow"))), request("free1", Sampling())]
    )
    ended: list[str] = []
    for _ in range(100):
        ended += [event.id for event in controller.step() if type(event).__name__ == "Finished"]
    assert ended == ["free1"]
    library.go_on.set()
    while not controller.idle:
        ended += [event.id for event in controller.step() if type(event).__name__ == "Finished"]
    assert ended == ["free1", "r0"]


@pytest.mark.parametrize(
    ("text", "said"),
    [("wrong", "no such grammar"), ("short", "a limit was reached"), ("broken", "the library has failed")],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_text_that_cannot_follow_its_grammar_ends_with_the_reason(
    opened: Any, play: Any, text: str, said: str, depth: int
) -> None:
    controller, _ = opened(depth)
    bad = Sampling(temperature=0.0, grammar=GrammarSpec(kind="regex", text=text))
    played = play(controller, [request("r0", bad), request("r1")])
    assert played.reasons() == {"r0": "error", "r1": "length"}
    assert said in str(played.ends["r0"][0].error) and follows(played.tokens["r1"])
    assert played.ends["r0"][0].status == 400, "no other server would have another answer"
    assert controller.scheduler.state.pool.used == 0 and len(played.tokens["r1"]) == 24


def test_a_grammar_is_compiled_once_for_all_requests(opened: Any, play: Any) -> None:
    controller, library = opened()
    sizes = [(0, 0), (3, 0), (0, 2), (0, 0)]
    grammars = [msgspec.structs.replace(STEPS, no_repeat=each) for each in sizes]
    play(controller, [request(f"r{i}", Sampling(temperature=1.0, seed=5, grammar=g)) for i, g in enumerate(grammars)])
    assert library.compiled == ["steps"]


def test_exactly_the_rows_of_requests_with_a_grammar_have_masks(opened: Any, play: Any) -> None:
    controller, _ = opened()
    counts: list[tuple[int, int]] = []
    submit = controller.executor.submit

    def check(plan: Order) -> None:
        if isinstance(plan, StepMasks):
            assert len(plan.masks) == counts[-1][0] and all(plan.masks)
            submit(plan)
            assert controller.executor.worker._draw is None, "the memory plan has room for the logits of one step"
            return
        asked = {each.slot for each in controller.scheduler.running if each.message.sampling.grammar is not None}
        expected = [index for index, row in enumerate(plan.samples) if plan.slots[row] in asked]
        assert plan.masked == expected
        counts.append((len(expected), len(plan.samples)))
        submit(plan)

    controller.executor.submit = check
    play(controller, mixed())
    assert any(masked for masked, _ in counts) and any(masked < rows for masked, rows in counts)


def test_a_step_starts_before_the_tokens_are_read_on_which_its_masks_depend(opened: Any, play: Any) -> None:
    controller, _ = opened(2)
    log = controller.executor.log
    submit = controller.executor.submit

    def noted(order: Order) -> None:
        if isinstance(order, StepMasks):
            log.append(("masks", order.plan))
        submit(order)

    controller.executor.submit = noted
    play(controller, [request("r0")])
    for plan in range(1, 23):
        at = [log.index((what, number)) for what, number in (("submit", plan), ("read", plan - 1), ("masks", plan))]
        assert at == sorted(at), f"plan {plan}: {log}"


def test_masks_of_another_plan_are_never_used(opened: Any) -> None:
    controller, _ = opened(1)
    submit = controller.executor.submit

    def wrong(order: Order) -> None:
        submit(StepMasks(plan=order.plan + 1, masks=order.masks) if isinstance(order, StepMasks) else order)

    controller.executor.submit = wrong
    controller.handle([request("r0")])
    with pytest.raises(AssertionError, match="plan 0 waits for masks, and those of plan 1 came"):
        for _ in range(10):
            controller.step()


def test_a_text_that_ends_while_the_next_step_runs_ends_with_stop(opened: Any, play: Any) -> None:
    # Its masks cannot be made then: the library says that the text is complete.
    controller, _ = opened(2)
    sampling = Sampling(temperature=0.0, grammar=SHORT)
    short = request("r0", sampling, stop_token_ids=list(range(9, VOCAB)))
    played = play(controller, [short, request("r1")])
    assert played.reasons() == {"r0": "stop", "r1": "length"}
    assert max(played.tokens["r0"][:-1]) < 9 <= played.tokens["r0"][-1]


def test_without_a_package_that_makes_masks_a_request_with_a_grammar_fails_and_names_one(
    make_config: Any, play: Any
) -> None:
    controller, _ = strict_controller(make_config("Llama", {**ONE_LAYER, "vocab_size": VOCAB}, **DELAYED))
    controller.scheduler.grammars = Grammars()
    found = play(controller, [request("r0"), request("r1", Sampling(temperature=0.0))])
    assert found.reasons() == {"r0": "error", "r1": "length"}
    assert "pip install evener-generation" in str(found.ends["r0"][0].error)
