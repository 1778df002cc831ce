"""A state provider that computes long state in another way gets captures for short and for long contexts, and each step
replays the one that its longest context needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from knowing_drafter import KnowingDrafter
from rerun_capture import Reruns

from evener.config import from_overrides, to_flat
from evener.engine.wire.messages import Abort, NewRequest, Sampling
from evener.engine.wire.plan import Plan
from evener.engine.worker.graphs import CaptureKey, StepGraphs
from evener_conformance.graph.device import GraphDevice
from evener_conformance.graph.state import MOST_LONG
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play
from evener_generation.drafting.model_drafter import ModelDrafter
from evener_generation.drafting.speculation import Speculation
from evener_inspection import thread_communicator

LIMIT, LONGEST = 21, 64
ONE_LAYER = {"num_hidden_layers": 1}
EAGER = {"infer.use_cuda_graph": False}
TWO = {"graphs.long_state": LIMIT}
GREEDY, WARM = Sampling(temperature=0.0), Sampling(temperature=1.0, top_p=0.9, seed=5)
PENALIZED = Sampling(temperature=0.0, repetition_penalty=0.6, frequency_penalty=0.5)


@dataclass
class Step:
    """One captured step: tokens of its longest context, its capture, and whether attention for short and for long state
    ran in it."""

    longest: int
    key: CaptureKey
    short: bool
    long: bool


def watched(graphs: StepGraphs) -> list[Step]:
    """The captured steps from now on; a list that grows."""
    seen: list[Step] = []
    execute = graphs.execute
    providers = [group.provider for group in graphs._runner.geometry.groups if group.slots]

    def ran() -> list[int]:
        return [sum(int(provider.computed[form]) for provider in providers) for form in (0, 1)]

    def runs() -> dict[CaptureKey, int]:
        return {key: step.replays[0].runs for key, step in graphs._captured.items() if step}  # type: ignore[attr-defined]

    def noted(plan: Plan) -> Any:
        before, counts = runs(), ran()
        result = execute(plan)
        if result is not None:
            [key] = [key for key, count in runs().items() if count > before.get(key, 0)]
            longest = max(start + count for start, count in zip(plan.starts, plan.counts, strict=True))
            seen.append(Step(longest, key, *(now > then for now, then in zip(ran(), counts, strict=True))))
        return result

    graphs.execute = noted  # type: ignore[method-assign]
    return seen


def check(steps: list[Step]) -> None:
    """Decode steps ran what their longest context needs, and nothing else; there were both kinds. More rows than
    ``MOST_LONG`` have one capture for all lengths."""
    decoded = [step for step in steps if not step.key.samples]
    for step in decoded:
        is_long, one = step.longest >= LIMIT and step.key.size <= MOST_LONG, step.key.size > MOST_LONG
        assert (step.short, step.long) == (not is_long, is_long), step
        assert step.key.length == (LONGEST if is_long or one else LIMIT - 1), step
    assert {step.long for step in decoded} == {False, True}
    assert all(step.key.length == LONGEST and step.short and not step.long for step in steps if step.key.samples)


def request(name: str, tokens: int, answer: int, sampling: Sampling = GREEDY) -> NewRequest:
    return NewRequest(id=name, prompt=[(7 * i + len(name) + tokens) % 90 for i in range(tokens)], max_tokens=answer,
                      sampling=sampling)  # fmt: skip


@pytest.mark.parametrize(
    "sampling",
    [pytest.param(GREEDY, marks=pytest.mark.slow), pytest.param(WARM, marks=pytest.mark.slow), PENALIZED],
    ids=["greedy", "random", "penalized"],
)
def test_a_request_changes_its_capture_when_its_context_reaches_the_limit(start: Any, sampling: Sampling) -> None:
    run, eager = start("Llama", ONE_LAYER, **TWO), start("Llama", ONE_LAYER, **EAGER)
    steps, asked = watched(run.worker.graphs), [request("a", 12, 24, sampling)]
    assert run.play(asked) == eager.play(asked)
    check(steps)
    # The first token is sampled behind the prompt. Each later step computes the token that was sampled before.
    assert [step.longest for step in steps if not step.key.samples] == list(range(13, 12 + 24))


def test_one_long_context_among_short_ones_decides_and_they_are_short_again_when_it_has_ended(start: Any) -> None:
    run, eager = start("Llama", ONE_LAYER, **TWO), start("Llama", ONE_LAYER, **EAGER)
    steps = watched(run.worker.graphs)
    asked = [request("a", 4, 9), request("long", 18, 6, WARM), *(request(f"b{i}", 3 + i, 9) for i in range(4))]
    assert run.play(asked, every=2) == eager.play(asked, every=2)
    check(steps)
    forms = [step.long for step in steps if not step.key.samples]
    changes = [now for then, now in pairwise(forms) if then != now]
    assert forms[0] is False and changes == [True, False]


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_requests_that_come_cross_the_limit_and_are_aborted_have_the_tokens_of_eager_steps(
    start: Any, depth: int
) -> None:
    asked = [request(f"r{i}", 5 + 2 * i, 24 - i, (GREEDY, WARM)[i % 2]) for i in range(9)]
    runs = [start("Llama", ONE_LAYER, **{"infer.depth": depth}, **more) for more in (TWO, EAGER)]
    steps = watched(runs[0].worker.graphs)
    for run in runs:
        run.play(asked, every=3, aborts={"r2": 3, "r7": 6})
        assert run.ends["r2"] == run.ends["r7"] == "abort" and run.controller.scheduler.state.pool.used == 0
    kept = [f"r{i}" for i in range(9) if i not in (2, 7)]
    assert [runs[0].tokens[name] for name in kept] == [runs[1].tokens[name] for name in kept]
    check(steps)


def test_the_step_after_an_abort_of_the_only_long_context_is_a_short_one(start: Any) -> None:
    run = start("Llama", ONE_LAYER, **{"infer.depth": 1}, **TWO)
    steps = watched(run.worker.graphs)
    run.controller.handle([request("a", 5, 12), request("long", 24, 12)])
    for _ in range(4):
        run.controller.step()
    assert steps[-1].long
    run.controller.handle([Abort("long")])
    run.controller.step()
    run.controller.step()
    assert not steps[-1].long and steps[-1].short and steps[-1].longest < LIMIT


def test_a_limit_in_one_of_two_groups_gives_captures_to_the_whole_step(start: Any) -> None:
    run, eager = start("Gemma3", **TWO), start("Gemma3", **EAGER)
    groups = run.worker.assembly.geometry.groups
    assert len(groups) > 1
    steps, asked = watched(run.worker.graphs), [request("a", 12, 20), request("bb", 9, 14)]
    assert run.play(asked, every=2) == eager.play(asked, every=2)
    check(steps)


def test_steps_with_drafts_have_one_capture_for_all_lengths_and_those_without_have_two(start: Any) -> None:
    plain = start("Llama", **EAGER)
    asked = request("a", 6, 30)
    plain.play([asked])
    answer = [*asked.prompt, *plain.tokens["a"]]
    KnowingDrafter.answers = [answer[:12], answer]
    run = start("Llama", **TWO)
    none = run.controller.scheduler.drafts
    run.controller.scheduler.drafts = Speculation(KnowingDrafter, 4, max_samples=9, vocabulary=10**9)
    steps = watched(run.worker.graphs)
    run.play([asked])
    assert run.tokens == plain.tokens
    assert any(step.key.samples > 1 and step.longest >= LIMIT for step in steps), "drafts beyond the limit"
    run.controller.scheduler.drafts = none
    again = request("bb", 6, 30)
    assert run.play([again])["bb"] == plain.play([again])["bb"]
    check(steps)


def test_a_draft_model_s_own_steps_change_their_capture_too(start: Any) -> None:
    plain = start("Llama", ONE_LAYER, **EAGER)
    run = start("Llama", ONE_LAYER, **TWO, **{"infer.draft_model": plain.worker.assembly.config.config.model})
    run.controller.scheduler.drafts = Speculation(ModelDrafter, 3, max_samples=18, vocabulary=10**9)
    steps = watched(run.worker.drafter.graphs)
    asked = [request("a", 9, 24), request("bb", 12, 18, WARM), request("ccc", 5, 12)]
    assert run.play(asked, every=2) == plain.play(asked, every=2)
    assert run.controller.scheduler.stats.accepted_tokens > 0
    check(steps)


def flat_of(run: Any, **more: Any) -> Any:
    flat = to_flat(run.worker.assembly.config.config) | {"infer.use_cuda_graph": True} | TWO | more
    return from_overrides(flat.pop("model"), flat)


def seen_by_workers(start: Any, **keys: Any) -> list[list[Step]]:
    """The captured steps of each of two workers, which gave the tokens of one that captures nothing."""
    alone = start("Llama", **EAGER)
    asked = [request(f"r{i}", 5 + 3 * i, 20 - i) for i in range(5)]
    with rank_threads(flat_of(alone, **keys)) as (controller, ranks):
        seen = [watched(worker.graphs) for worker in ranks.workers]
        played = play(controller, asked, arrivals={message.id: 2 * i for i, message in enumerate(asked)})
    assert played.tokens == alone.play(asked, every=2)
    for steps in seen:
        check(steps)
    return seen


def test_every_stage_of_a_pipeline_changes_its_capture_with_the_same_plan(start: Any) -> None:
    seen = seen_by_workers(start, **{"infer.pp_size": 2, "infer.depth": 3})
    assert [step.longest for step in seen[0]] == [step.longest for step in seen[1]]
    assert [step.key.length for step in seen[0]] == [step.key.length for step in seen[1]]


def test_ranks_that_share_layers_make_and_replay_the_same_captures(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Device(GraphDevice):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.capture: Any = Reruns(frozenset())

    monkeypatch.setattr("evener_conformance.graph.device.GraphDevice", Device)
    capturing = replace(thread_communicator._CAPABILITIES, capturable=True)
    monkeypatch.setattr(thread_communicator, "_CAPABILITIES", capturing)
    seen = seen_by_workers(start, **{"infer.tp_size": 2})
    assert [step.key for step in seen[0]] == [step.key for step in seen[1]]


def test_a_device_that_holds_few_captures_has_one_for_all_lengths(start: Any) -> None:
    run, eager = (start("Llama", ONE_LAYER, **more) for more in ({**TWO, "graphs.max_captures": 8}, EAGER))
    asked = [request("a", 12, 24)]
    assert run.play(asked) == eager.play(asked)
    assert {key.length for key in run.worker.graphs._captured} == {LONGEST}
    assert set(run.worker.graphs._lengths.values()) == {(LONGEST,)}


@pytest.mark.parametrize("limit", [1, LONGEST + 1])
def test_a_limit_that_no_context_or_every_context_reaches_makes_no_second_capture(start: Any, limit: int) -> None:
    run = start("Llama", ONE_LAYER, **{"graphs.long_state": limit})
    assert set(run.worker.graphs._lengths.values()) == {(LONGEST,)}
    assert not any("apart for contexts" in note for note in run.notes)


def test_the_longest_context_alone_may_have_a_capture_of_its_own(start: Any) -> None:
    run, eager = start("Llama", ONE_LAYER, **{"graphs.long_state": LONGEST}), start("Llama", ONE_LAYER, **EAGER)
    asked = [request("a", 58, 6)]
    assert run.play(asked) == eager.play(asked)
    assert run.worker.graphs._lengths == {
        size: (LONGEST - 1, LONGEST) if size <= MOST_LONG else (LONGEST,) for size in (1, 2, 4, 8, 9)
    }


def test_the_manifest_says_for_which_contexts_steps_are_captured_apart(start: Any) -> None:
    run = start("Llama", ONE_LAYER, **TWO)
    assert [note for note in run.notes if "captured" in note] == [
        f"decode steps of up to 9 rows (apart for contexts of up to {LIMIT - 1}, {LONGEST} tokens) and single prompts "
        "of up to 32 tokens are captured by graphs"
    ]
