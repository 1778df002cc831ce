"""Speculative decoding: the same tokens with drafts and without, fewer steps where drafts are right, and off where they
do not pay."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from knowing_drafter import KnowingDrafter

from evener.contracts.generation.drafter import Drafter
from evener.engine.controller.controller import Controller
from evener.engine.controller.request import Request
from evener.engine.wire.messages import LogitBias, NewRequest, Sampling
from evener.errors import ConfigError, DescriptorError
from evener.ops.reference.state import ReferenceState
from evener.plugins.catalog import Catalog, LazyImport
from evener_conformance.naive.model import NaiveModel
from evener_conformance.reference.executor import strict_controller
from evener_generation.drafting.speculation import Speculation

DELAYED = {"reference.delay": True, "infer.max_reqs": 4, "infer.kv_memory": 2**24}
ONE_LAYER = {"num_hidden_layers": 1}
#: What a request may ask for while it decodes: each depends on the tokens before, or on their positions.
ASKED = {
    "greedy": Sampling(temperature=0.0),
    "seeded": Sampling(temperature=0.8, top_p=0.9, seed=5),
    "log-probabilities": Sampling(temperature=0.0, logprobs=2),
    "penalties": Sampling(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2),
    "biases": Sampling(temperature=0.0, bias=[LogitBias(7, 5.0, 3), LogitBias(9, -5.0)]),
}


def requests() -> list[NewRequest]:
    return [
        NewRequest(id=name, prompt=[5, 6, 7, 8 + at, 5, 6, 7, 8 + at, 5], max_tokens=12 + at, sampling=sampling)
        for at, (name, sampling) in enumerate(ASKED.items())
    ]


def drafted(controller: Controller, length: int = 4, drafter: type[Drafter] = KnowingDrafter) -> Controller:
    controller.scheduler.drafts = Speculation(drafter, length, max_samples=4 + length, vocabulary=10**9)
    return controller


@pytest.mark.parametrize(
    ("family", "changes", "depth"),
    [
        *(pytest.param("Llama", {"num_hidden_layers": 2}, depth, marks=pytest.mark.slow) for depth in (1, 2)),
        ("Gemma2", {"sliding_window": 6}, 2),
        pytest.param("DeepseekV3", {"num_hidden_layers": 2, "first_k_dense_replace": 2}, 2, marks=pytest.mark.slow),
        pytest.param("Qwen3Next", {"num_experts": 0}, 1, marks=pytest.mark.slow),
        ("Qwen3Next", {"num_experts": 0}, 2),
    ],
)
def test_tokens_are_the_same_with_drafts_and_without(
    make_lively: Any, play: Any, family: str, changes: dict[str, int], depth: int
) -> None:
    options = {**DELAYED, "infer.depth": depth, "infer.step_tokens": 16}
    controller, _ = strict_controller(make_lively(family, changes, **options))
    plain = play(controller, requests())
    assert set(plain.reasons().values()) == {"length"}, plain.ends
    steps = controller.scheduler.stats.steps
    KnowingDrafter.answers = [each.prompt + plain.tokens[each.id] for each in requests()]
    again = play(drafted(controller), [*map(with_new_id, requests())])
    stats = controller.scheduler.stats
    assert {f"{name} again": tokens for name, tokens in plain.tokens.items()} == again.tokens
    for mine, theirs in zip(again.logprobs.values(), plain.logprobs.values(), strict=True):
        assert [each.ids for each in mine] == [each.ids for each in theirs]
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.steps - steps < steps, "right drafts save steps"
    assert controller.scheduler.state.pool.used == 0


@pytest.mark.parametrize("every", [16, pytest.param(32, marks=pytest.mark.slow)])
def test_recurrent_rows_are_those_of_right_tokens_also_in_the_prefix_cache(
    make_lively: Any, play: Any, every: int
) -> None:
    config = make_lively("Qwen3Next", {"num_experts": 0}, **DELAYED, **{"infer.snapshot_every": every})
    naive = NaiveModel(config.model, max_positions=128)
    first = NewRequest(id="r", prompt=[5, 6, 7, 8, 5], max_tokens=60, sampling=Sampling(temperature=0.0))
    answer = naive.greedy(first.prompt, 60)
    KnowingDrafter.answers = [first.prompt + answer]
    controller = drafted(strict_controller(config)[0], length=6)
    assert play(controller, [first]).tokens["r"] == answer
    stats = controller.scheduler.stats
    assert 0 < stats.accepted_tokens < stats.drafted_tokens and stats.steps < 40
    # Drafts, wrong ones among them, lay over the ends of the blocks that the next request continues from.
    second = NewRequest(id="s", prompt=first.prompt + answer[:50], max_tokens=10, sampling=first.sampling)
    found = play(controller, [second])
    assert found.cached["s"] == 54 // every * every and found.tokens["s"] == answer[50:]


def test_recurrent_layers_on_a_provider_that_keeps_wrong_drafts_have_none(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReferenceState, "drafts", False)
    with pytest.raises(ConfigError, match=r"reference keeps none; set ops\.attention=reference, or leave"):
        strict_controller(make_config("Qwen3Next", **DELAYED, **{"infer.drafter": "ngram"}))


def with_new_id(message: NewRequest) -> NewRequest:
    return NewRequest(
        id=f"{message.id} again", prompt=message.prompt, max_tokens=message.max_tokens, sampling=message.sampling
    )


def test_a_stop_token_ends_a_request_in_the_middle_of_right_drafts(make_lively: Any, play: Any) -> None:
    controller, _ = strict_controller(make_lively("Llama", ONE_LAYER, **DELAYED))
    greedy = requests()[0]
    whole = play(controller, [greedy]).tokens[greedy.id]
    stop = whole[6]
    expected = whole[: whole.index(stop) + 1]
    KnowingDrafter.answers = [greedy.prompt + whole]
    message = NewRequest(
        id="stop", prompt=greedy.prompt, max_tokens=12, sampling=greedy.sampling, stop_token_ids=[stop]
    )
    found = play(drafted(controller), [message])
    assert found.tokens["stop"] == expected and found.reasons() == {"stop": "stop"}


def test_the_installed_drafter_repeats_what_a_text_repeats(make_config: Any, play: Any) -> None:
    config = make_config("Llama", ONE_LAYER, **DELAYED, **{"infer.drafter": "ngram", "infer.draft_tokens": 8})
    controller, _ = strict_controller(config)
    message = NewRequest(
        id="r", prompt=[1, 2, 3], max_tokens=40, sampling=Sampling(temperature=0.0, bias=[LogitBias(9, 1e9)])
    )
    assert play(controller, [message]).tokens["r"] == [9] * 40
    assert controller.scheduler.stats.steps < 16 and controller.scheduler.stats.accepted_tokens > 24


def test_no_step_samples_more_rows_than_the_memory_plan_has_room_for(make_config: Any, play: Any) -> None:
    controller, executor = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED))
    most: list[int] = []
    submit = executor.submit
    executor.submit = lambda order: (most.append(len(order.samples)), submit(order))[1]  # type: ignore[method-assign, func-returns-value, assignment]
    bias = Sampling(temperature=0.0, bias=[LogitBias(9, 1e9)])
    messages = [NewRequest(id=f"r{i}", prompt=[9] * 6, max_tokens=20, sampling=bias) for i in range(6)]
    KnowingDrafter.answers = [[9] * 40]
    play(drafted(controller, length=3), messages)
    assert max(most) == 4 + 3


class Faulty(Drafter):
    """Fails in one of several ways."""

    fault = ""

    def __init__(self) -> None:
        if self.fault == "construct":
            raise OSError("no disk")

    def extend(self, tokens: Sequence[int]) -> None:
        if self.fault == "extend":
            raise KeyError(tokens[-1])

    def propose(self, count: int) -> Sequence[int]:
        return {"large": [10**9], "negative": [-1], "kind": [1.5]}[self.fault]  # type: ignore[list-item]


@pytest.mark.parametrize(
    "fault", ["construct", "extend", "kind", *(pytest.param(f, marks=pytest.mark.slow) for f in ("large", "negative"))]
)
def test_a_faulty_drafter_ends_drafts_with_a_warning_and_no_request(
    make_config: Any, play: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(Faulty, "fault", fault)
    controller, _ = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED))
    controller.scheduler.drafts = Speculation(Faulty, 4, max_samples=8, vocabulary=64)
    with caplog.at_level("WARNING", "evener.engine"):
        found = play(controller, requests())
    assert set(found.reasons().values()) == {"length"} and controller.scheduler.stats.drafts == 0
    (line,) = caplog.messages
    assert "no more drafts" in line and "Faulty" in line


def test_something_other_than_a_drafter_is_refused_with_its_package(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = LazyImport(kind="drafter", name="odd", path="json:loads", package="odd", distribution="odd-drafts")
    others = Catalog.lazy_imports
    monkeypatch.setattr(
        Catalog, "lazy_imports", lambda self, kind: {"odd": found} if kind == "drafter" else others(self, kind)
    )
    with pytest.raises(DescriptorError, match="'odd' of odd-drafts: json:loads is no Drafter"):
        strict_controller(make_config("Llama", **DELAYED, **{"infer.drafter": "odd"}))


def test_wrong_drafts_make_longer_and_longer_pauses(make_lively: Any, play: Any) -> None:
    controller, _ = strict_controller(make_lively("Llama", ONE_LAYER, **DELAYED))
    greedy = requests()[0]
    message = NewRequest(id="r", prompt=greedy.prompt, max_tokens=60, sampling=greedy.sampling)
    answer = play(controller, [message]).tokens["r"]
    Stubborn.wrong = max(answer) + 1
    again = NewRequest(id="again", prompt=greedy.prompt, max_tokens=60, sampling=greedy.sampling)
    assert play(drafted(controller, drafter=Stubborn), [again]).tokens["again"] == answer
    assert controller.scheduler.stats.drafts == 5, "behind 1, 4, 9, 18 and 35 tokens"


class Stubborn(Drafter):
    """Always proposes one wrong token."""

    wrong = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Learn nothing."""

    def propose(self, count: int) -> Sequence[int]:
        return [self.wrong] * count


@pytest.mark.parametrize(
    ("family", "options", "problem"),
    [
        ("Llama", {"infer.drafter": "nobody"}, "installed drafters: grammar, model, mtp, ngram"),
        ("Llama", {"infer.drafter": "ngram", "infer.pp_size": 2}, "does not work with pipeline stages"),
    ],
)
def test_settings_without_drafts_are_refused(
    make_config: Any, family: str, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        strict_controller(make_config(family, **{**DELAYED, **options}))


def test_a_drafter_without_a_policy_is_refused_with_the_package_that_has_one(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = Catalog.lazy_imports
    monkeypatch.setattr(
        Catalog, "lazy_imports", lambda self, kind: {} if kind == "draft policy" else others(self, kind)
    )
    with pytest.raises(ConfigError, match="pip install evener-generation"):
        strict_controller(make_config("Llama", **DELAYED, **{"infer.drafter": "ngram"}))


def test_a_request_has_no_drafts_before_a_step_that_ends_where_a_fork_starts() -> None:
    request = Request(requests()[0], 0)
    request.computed = request.length - 1
    assert request.decodes
    for point, decodes in ((request.computed - 1, True), (request.computed, False), (request.computed + 1, False)):
        request.fork_points = {point}
        assert request.decodes == decodes


class Undecided:
    """Says of some plans that drafts pay, of others that they do not."""

    def __init__(self) -> None:
        self._random = Random(1)

    def record(self, requests: int, drafted: bool, tokens: int, seconds: float) -> None:
        pass

    def pays(self, requests: int) -> bool:
        return self._random.random() < 0.6


@pytest.mark.parametrize("family", ["Llama", pytest.param("Qwen3Next", marks=pytest.mark.slow)])
def test_a_request_waits_for_its_proposed_tokens_though_drafts_do_not_pay_any_more(
    make_lively: Any, play: Any, family: str
) -> None:
    changes = ONE_LAYER if family == "Llama" else {"num_experts": 0}
    controller, _ = strict_controller(make_lively(family, changes, **DELAYED, **{"infer.depth": 2}))
    plain = play(controller, requests())
    KnowingDrafter.answers = [each.prompt + plain.tokens[each.id] for each in requests()]
    payoff: Any = Undecided()
    controller.scheduler.drafts = Speculation(KnowingDrafter, 4, 8, vocabulary=10**9, payoff=payoff)
    again = play(controller, [*map(with_new_id, requests())])
    assert {f"{name} again": tokens for name, tokens in plain.tokens.items()} == again.tokens
    assert controller.scheduler.stats.accepted_tokens
