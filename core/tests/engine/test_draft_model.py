"""A draft model: the same tokens with it and without, fewer steps where it is right, and state that is never missing.

A greedy model that drafts for itself is right each time, if its state as a draft model is that of the same tokens. So
each proposed token that is wrong shows state that was not computed, or was computed for other tokens.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from evener_drafts.model import DraftRunner

from evener.config.schema import Config
from evener.contracts.device import MemoryInfo
from evener.contracts.generation.drafts import Drafts
from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import ConfigError, MemoryPlanError
from evener_conformance.reference.device import HostDevice
from evener_conformance.reference.engine import RunResult
from evener_conformance.reference.executor import strict_controller
from evener_generation.drafting.model_drafter import ModelDrafter
from evener_generation.drafting.speculation import Speculation

LIMITS = {"reference.delay": True, "infer.max_reqs": 4, "infer.kv_memory": 2**24, "infer.step_tokens": 16}
TWO_LAYERS = {"num_hidden_layers": 2}
GREEDY = Sampling(temperature=0.0)
#: What a request may ask for while it decodes: each depends on the tokens before, or on their positions.
ASKED = [GREEDY, Sampling(temperature=0.8, top_p=0.9, seed=5), Sampling(temperature=0.0, logprobs=2),
         Sampling(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2)]  # fmt: skip


def requests(*asked: Sampling, prefix: str = "r") -> list[NewRequest]:
    """Prompts of different lengths, some of which several steps compute."""
    return [
        NewRequest(id=f"{prefix}{at}", prompt=[5, 6, 7, 8 + at] * (2 + 3 * at), max_tokens=14 + at, sampling=sampling)
        for at, sampling in enumerate(asked)
    ]


def drafted(config: Config, draft: Config | None = None) -> Config:
    """With the model of ``draft``, or its own, as the draft model."""
    return dataclasses.replace(config, infer=dataclasses.replace(config.infer, draft_model=(draft or config).model))


def always(controller: Controller) -> Controller:
    """With drafts in each step that can have some, whatever they cost."""
    controller.scheduler.drafts = Speculation(ModelDrafter, length=4, max_samples=20, vocabulary=10**9)
    return controller


@pytest.mark.parametrize(
    ("family", "changes", "depth"),
    [
        pytest.param("Llama", TWO_LAYERS, 1, marks=pytest.mark.slow),
        pytest.param("Llama", TWO_LAYERS, 2, marks=pytest.mark.slow),
        ("Gemma2", {"sliding_window": 6}, 2),
        pytest.param("DeepseekV3", {"num_hidden_layers": 2, "first_k_dense_replace": 2}, 2, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_the_same_with_a_draft_model_and_without(
    make_lively: Any, play: Any, family: str, changes: dict[str, int], depth: int
) -> None:
    config = make_lively(family, changes, **LIMITS, **{"infer.depth": depth})
    plain, _ = strict_controller(config)
    expected = play(plain, requests(*ASKED))
    assert set(expected.reasons().values()) == {"length"}, expected.ends
    controller = always(strict_controller(drafted(config))[0])
    found = play(controller, requests(*ASKED))
    assert found.tokens == expected.tokens
    for mine, theirs in zip(found.logprobs.values(), expected.logprobs.values(), strict=True):
        assert [each.ids for each in mine] == [each.ids for each in theirs]
    stats = controller.scheduler.stats
    assert 0 < stats.accepted_tokens < stats.drafted_tokens, "those of penalties and random numbers may be wrong"
    assert stats.steps < plain.scheduler.stats.steps
    assert controller.scheduler.state.pool.used == 0


def test_each_token_that_a_model_proposes_for_itself_is_right(make_lively: Any, play: Any) -> None:
    config = make_lively("Llama", TWO_LAYERS, **LIMITS)
    expected = play(strict_controller(config)[0], requests(*[GREEDY] * 4))
    controller = always(strict_controller(drafted(config))[0])
    assert play(controller, requests(*[GREEDY] * 4)).tokens == expected.tokens
    stats = controller.scheduler.stats
    assert stats.accepted_tokens == stats.drafted_tokens > 30
    # The same prompts and answers again, from the prefix cache.
    messages = [longer(m, f"more{m.id}", m.prompt + expected.tokens[m.id]) for m in requests(*[GREEDY] * 4)]
    again = play(controller, messages)
    assert min(again.cached.values()) > 0
    wrong = stats.drafted_tokens - stats.accepted_tokens
    assert wrong == 0, f"{wrong} wrong of {stats.drafted_tokens}"


def longer(message: NewRequest, name: str, prompt: list[int]) -> NewRequest:
    return NewRequest(id=name, prompt=prompt, max_tokens=message.max_tokens, sampling=message.sampling)


def test_preempted_requests_get_right_drafts_again(make_lively: Any, play: Any, shrink_pool: Any) -> None:
    config = make_lively("Llama", TWO_LAYERS, **{**LIMITS, "infer.step_tokens": 24, "infer.block_size": 16})
    messages = [NewRequest(id=f"r{i}", prompt=[7 + i] * 20, max_tokens=40, sampling=GREEDY) for i in range(4)]
    expected = play(strict_controller(config)[0], messages).tokens
    controller, _ = strict_controller(drafted(config))
    groups = len(controller.scheduler.state.specs)
    shrink_pool(controller, 9 * groups)
    found = play(always(controller), messages)
    stats = controller.scheduler.stats
    assert found.tokens == expected and stats.preemptions > 0
    assert stats.accepted_tokens == stats.drafted_tokens > 0


@pytest.mark.parametrize(
    ("streams", "together"),
    [(True, True), *(pytest.param(*e, marks=pytest.mark.slow) for e in ((False, False), (False, True), (True, False)))],
)
def test_draft_state_comes_back_from_host_memory_with_the_rest(
    streams: bool, together: bool, make_lively: Any, play: Any, shrink_pool: Any, request: pytest.FixtureRequest
) -> None:
    if streams:
        request.getfixturevalue("late")
    config = make_lively("Llama", TWO_LAYERS, **{**LIMITS, "infer.kv_host_memory": "8MiB", "infer.block_size": 16})
    first = [NewRequest(id=f"a{i}", prompt=[7 + i, 9] * 20, max_tokens=20, sampling=GREEDY) for i in range(3)]
    plain = strict_controller(config)[0]
    answers = play(plain, first).tokens
    second = [longer(m, f"b{m.id}", m.prompt + answers[m.id]) for m in first]
    want = {**answers, **play(plain, second).tokens}
    controller = always(strict_controller(drafted(config))[0])
    shrink_pool(controller, controller.scheduler.state.slabs_for(80, controller.scheduler.step_tokens) + 2)
    turns = [first, second] if together else [[one] for one in (*first, *second)]
    found = {name: tokens for turn in turns for name, tokens in play(controller, turn).tokens.items()}
    stats = controller.scheduler.stats
    assert found == want and stats.counters["kv_host_hits"] >= 3
    assert stats.accepted_tokens == stats.drafted_tokens > 30


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("Llama", TWO_LAYERS, marks=pytest.mark.slow),
        ("DeepseekV3", {**TWO_LAYERS, "first_k_dense_replace": 2}),
    ],
)
def test_the_dtype_of_the_models_state_is_not_that_of_the_draft_models(
    family: str, changes: dict[str, int], make_lively: Any, play: Any
) -> None:
    config = make_lively(family, changes, **LIMITS, **{"infer.kv_dtype": "fp8_e4m3"})
    expected = play(strict_controller(config)[0], requests(*[GREEDY] * 4)).tokens
    controller, executor = strict_controller(drafted(config))
    assert play(always(controller), requests(*[GREEDY] * 4)).tokens == expected
    found = [{tensor.dtype for tensor in group.spec.tensors} for group in executor.worker.assembly.geometry.groups]
    assert found == [{"float8_e4m3fn"}, {"float32"}]


def test_forks_and_aborts_leave_no_draft_without_its_state(make_lively: Any, play: Any) -> None:
    config = make_lively("Llama", TWO_LAYERS, **LIMITS)
    prompt = [*range(20, 61)]
    messages = [
        NewRequest(id="r0", prompt=prompt, max_tokens=20, sampling=GREEDY),
        NewRequest(id="r1", prompt=prompt, max_tokens=20, sampling=GREEDY, fork_of="r0"),
        NewRequest(id="r2", prompt=[*prompt[:30], 3, 4], max_tokens=20, sampling=GREEDY, fork_of="r0"),
        NewRequest(id="gone", prompt=prompt[5:], max_tokens=20, sampling=GREEDY),
        NewRequest(id="late", prompt=prompt[9:], max_tokens=20, sampling=GREEDY),
    ]
    expected = play(strict_controller(config)[0], messages, aborts={"gone": 3})
    controller = always(strict_controller(drafted(config))[0])
    found = play(controller, messages, aborts={"gone": 3})
    assert found.reasons() == expected.reasons()
    for name in ("r0", "r1", "r2", "late"):
        assert found.tokens[name] == expected.tokens[name]
    stats = controller.scheduler.stats
    assert stats.forks > 0 and stats.accepted_tokens == stats.drafted_tokens > 30


def test_a_smaller_model_of_another_family_drafts(make_lively: Any, play: Any) -> None:
    config = make_lively("Llama", {**TWO_LAYERS, "vocab_size": 120}, **LIMITS)
    other = make_lively("Qwen3", {"num_hidden_layers": 1, "vocab_size": 100}, **LIMITS)
    expected = play(strict_controller(config)[0], requests(*ASKED))
    controller, executor = strict_controller(drafted(config, other))
    messages = [*requests(*ASKED), NewRequest(id="high", prompt=[119, 110, 101], max_tokens=3, sampling=GREEDY)]
    found = play(always(controller), messages)
    assert {name: tokens for name, tokens in found.tokens.items() if name != "high"} == expected.tokens
    assert controller.scheduler.stats.drafted_tokens > 0
    plan = executor.worker.facts.info.memory
    assert plan.weights > strict_controller(config)[1].worker.facts.info.memory.weights


def test_a_draft_model_that_may_soon_propose_computes_a_plan_s_tokens_in_one_step(
    make_config: Any, play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[int, int]] = []
    execute = DraftRunner.execute
    monkeypatch.setattr(
        DraftRunner, "execute",
        lambda self, plan: (sizes.append((sum(plan.counts), len(plan.samples))), execute(self, plan))[1],
    )  # fmt: skip
    controller, _ = strict_controller(drafted(make_config("Llama", TWO_LAYERS, **LIMITS)))
    controller.scheduler.drafts = Speculation(ModelDrafter, 4, max_samples=1, vocabulary=10**9)  # room for no drafts
    sizes.clear()
    play(controller, [NewRequest(id="r", prompt=[3] * 20, max_tokens=5, sampling=GREEDY)])
    assert sizes == [(16, 0), (4, 0), (1, 0)], "then it rests"


def test_tokens_that_the_draft_model_has_left_over_do_not_make_a_step_larger_than_the_budget(
    make_lively: Any, play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_lively("Llama", TWO_LAYERS, **LIMITS)
    messages = [NewRequest(id=f"r{i}", prompt=[7 + i, 9], max_tokens=40, sampling=GREEDY) for i in range(3)]
    late = NewRequest(id="late", prompt=[3, 4] * 30, max_tokens=9, sampling=GREEDY)
    expected = play(strict_controller(config)[0], [*messages, late]).tokens
    controller = always(strict_controller(drafted(config))[0])
    sizes: list[int] = []
    execute = DraftRunner.execute
    monkeypatch.setattr(
        DraftRunner, "execute", lambda self, plan: (sizes.append(sum(plan.counts)), execute(self, plan))[1]
    )
    controller.handle(messages)
    played = RunResult()
    while controller.scheduler.stats.accepted_tokens < 12:
        played.see(controller.step())
    drafts, controller.scheduler.drafts = controller.scheduler.drafts, Drafts()  # as when they no longer pay
    controller.handle([late])
    for _ in range(4):
        played.see(controller.step())
    controller.scheduler.drafts = drafts
    while not controller.idle:
        played.see(controller.step())
    assert not played.dead and played.tokens == expected and max(sizes) == 16
    stats = controller.scheduler.stats
    assert stats.accepted_tokens == stats.drafted_tokens


def test_two_ranks_share_the_draft_model(make_lively: Any, play: Any) -> None:
    config = make_lively("Llama", {"num_hidden_layers": 1}, **{**LIMITS, "executor": "inline"})
    expected = play(build_controller(config)[0], requests(*ASKED)).tokens
    both = drafted(config)
    both = dataclasses.replace(both, infer=dataclasses.replace(both.infer, tp_size=2))
    controller, _ = build_controller(both)
    assert play(always(controller), requests(*ASKED)).tokens == expected
    assert controller.scheduler.stats.accepted_tokens > 0
    controller.executor.close()


@pytest.mark.parametrize(
    ("changes", "options", "problem"),
    [
        ({"vocab_size": 500}, {}, "500 token ids, and the model 211"),
        ({"max_position_embeddings": 64}, {}, "has 64 positions.*set infer.max_seq_len=64"),
        ({}, {"infer.drafter": "ngram"}, "proposes tokens without infer.draft_model"),
        ({}, {"infer.pp_size": 2}, "does not work with pipeline stages"),
    ],
)
def test_a_draft_model_that_cannot_propose_is_refused_before_weights_are_read(
    make_config: Any, changes: dict[str, Any], options: dict[str, Any], problem: str
) -> None:
    config, other = make_config("Llama", TWO_LAYERS, **LIMITS, **options), make_config("Llama", changes)
    with pytest.raises(ConfigError, match=problem):
        build_controller(drafted(config, other))


def test_a_draft_model_whose_state_cannot_go_back_is_refused(make_config: Any) -> None:
    shape = {"vocab_size": 150, "max_position_embeddings": 256}
    with pytest.raises(ConfigError, match="a layer of the draft model has state of kind 'recurrent'"):
        build_controller(drafted(make_config("Llama", shape, **LIMITS), make_config("Qwen3Next", shape)))


@pytest.mark.slow
def test_a_draft_model_drafts_for_a_model_with_recurrent_layers(make_lively: Any, play: Any) -> None:
    config = make_lively("Qwen3Next", {"num_experts": 0, "vocab_size": 5}, **LIMITS)
    draft = make_lively("Llama", {**TWO_LAYERS, "vocab_size": 5}, **LIMITS)
    messages = [NewRequest(id=m.id, prompt=[each % 5 for each in m.prompt], max_tokens=20, sampling=m.sampling)
                for m in requests(*ASKED)]  # fmt: skip
    expected = play(strict_controller(config)[0], messages).tokens
    controller = always(strict_controller(drafted(config, draft))[0])
    assert play(controller, messages).tokens == expected
    stats = controller.scheduler.stats
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


def test_the_drafter_of_a_draft_model_needs_one(make_config: Any) -> None:
    with pytest.raises(ConfigError, match=r"set infer\.draft_model=FOLDER"):
        build_controller(make_config("Llama", **LIMITS, **{"infer.drafter": "model"}))


def test_a_draft_model_that_does_not_fit_is_refused_with_the_memory_of_both(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostDevice, "memory", lambda self: MemoryInfo(2**27, 2**27))
    config, other = make_config("Llama", TWO_LAYERS, **LIMITS), make_config("Llama", {"intermediate_size": 2**19})
    build_controller(config)
    with pytest.raises(MemoryPlanError, match="the model does not fit: its weights take"):
        build_controller(drafted(config, other))


def write_tokenizer(config: Config, *words: str) -> None:
    vocab = {word: at for at, word in enumerate(words)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": words[0]}
    text = json.dumps({"version": "1.0", "added_tokens": [], "model": model})
    (Path(config.model) / "tokenizer.json").write_text(text)


def test_a_draft_model_with_another_tokenizer_is_refused(make_config: Any, play: Any) -> None:
    config, other = make_config("Llama", TWO_LAYERS, **LIMITS), make_config("Llama", {"num_hidden_layers": 1})
    write_tokenizer(config, "<unk>", "one", "two")
    write_tokenizer(other, "<unk>", "one", "zwei")
    with pytest.raises(ConfigError, match=r"token 2 is 'zwei', and 'two' in .*take a smaller model of the same family"):
        build_controller(drafted(config, other))
    write_tokenizer(other, "<unk>", "one", "two", "three")
    controller, _ = build_controller(drafted(config, other))
    assert play(controller, requests(GREEDY)).reasons() == {"r0": "length"}
