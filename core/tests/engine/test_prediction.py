"""A model's own layer for multi-token prediction proposes what it would propose for the text alone, in any company."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from drafted_requests import always, requests
from evener_drafts.prediction import Prediction

from evener.contracts.generation.drafts import NEVER, Drafts
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import ConfigError
from evener_conformance.naive.model import NaiveModel, NaiveStep
from evener_conformance.reference.engine import RunResult
from evener_conformance.reference.executor import strict_controller

LIMITS = {"reference.delay": True, "infer.max_reqs": 4, "infer.kv_memory": 2**24, "infer.step_tokens": 16}
#: Few tokens, so that random weights are right now and then; dense layers, because the reference experts read on the
#: host.
SHAPE = {"num_hidden_layers": 2, "first_k_dense_replace": 9, "num_nextn_predict_layers": 1, "vocab_size": 11}
#: Most of its layers are recurrent.
RECURRENT = {"num_hidden_layers": 4, "num_experts": 0, "vocab_size": 11}
MTP = {"infer.drafter": "mtp"}


def drafts_of(naive: NaiveModel, text: list[int], count: int) -> list[int]:
    """What the layer proposes behind a text: from the model's hidden states of all of it, then from its own."""
    naive.reset()
    ids, metas = torch.tensor(text, dtype=torch.int32), (None,) * len(naive.build.slots)
    step, found = NaiveStep(ids[:-1], torch.arange(len(text) - 1), metas=metas), list[int]()
    with torch.inference_mode():
        hidden = naive.model.forward(step)
        step.token_ids = ids[1:]
        states = naive.model.predict(hidden, step)[-1:]
        while True:
            found.append(int(naive.model.predicted(states, step).argmax()))
            if len(found) == count:
                return found
            place = torch.tensor([len(text) + len(found) - 2])
            step = NaiveStep(torch.tensor(found[-1:], dtype=torch.int32), place, metas=metas)
            states = naive.model.predict(states, step, own=True)


@pytest.mark.parametrize(
    ("family", "shape", "depth", "answer"),
    [pytest.param("DeepseekV3", SHAPE, 1, 24, marks=pytest.mark.slow),
     ("Glm4Moe", {**SHAPE, "attention_bias": False}, 2, 24),
     pytest.param("DeepseekV3", SHAPE, 2, 24, marks=pytest.mark.slow),
     pytest.param("Qwen3Next", RECURRENT, 2, 40, marks=pytest.mark.slow)],
)  # fmt: skip
def test_tokens_are_the_same_and_the_layer_proposes_what_it_would_for_each_text_alone(
    make_lively: Any, play: Any, family: str, shape: dict[str, int], depth: int, answer: int
) -> None:
    config = make_lively(family, shape, **LIMITS, **{"infer.depth": depth})
    plain, _ = strict_controller(config)
    expected = play(plain, requests(answer))
    controller, _ = strict_controller(replace(config, infer=replace(config.infer, drafter="mtp")))
    seen = always(controller)
    found = play(controller, requests(answer))
    assert found.tokens == expected.tokens
    stats = controller.scheduler.stats
    assert 0 < stats.accepted_tokens < stats.drafted_tokens == sum(map(len, seen.values()))
    naive = NaiveModel(config.model, predicts=True)
    texts = {m.id: [*m.prompt, *found.tokens[m.id]] for m in requests(answer)}
    assert len(seen) > 15 and max(map(len, seen.values())) == 4
    prompts = {m.id: len(m.prompt) for m in requests(answer)}
    for (name, length), ids in seen.items():
        # A last token of a prompt that a step computes alone has drafts too, which are a guess.
        assert length == prompts[name] or ids == drafts_of(naive, texts[name][:length], len(ids)), (name, length)
    assert controller.scheduler.state.pool.used == 0


@pytest.mark.slow  # those of an EAGLE head are quick
def test_forks_preemptions_and_cached_prefixes_change_no_token(make_lively: Any, play: Any, shrink_pool: Any) -> None:
    config = make_lively("DeepseekV3", SHAPE, **LIMITS, **MTP, **{"infer.block_size": 16})
    prompt, greedy = [1 + i * i % 9 for i in range(33)], Sampling(temperature=0.0)
    messages = [
        NewRequest(id=f"r{i}", prompt=[*prompt[: 33 - i], i], max_tokens=30, sampling=greedy, fork_of="r0" if i else "")
        for i in range(4)
    ]
    naive = NaiveModel(config.model)
    expected = {m.id: naive.greedy(m.prompt, 30) for m in messages}
    controller, _ = strict_controller(config)
    shrink_pool(controller, 9)
    always(controller)
    assert play(controller, messages).tokens == expected
    stats = controller.scheduler.stats
    assert stats.preemptions and stats.forks and stats.accepted_tokens


def test_a_layer_rests_without_drafts_and_proposes_for_texts_that_it_knows_whole(
    make_lively: Any, play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_lively("DeepseekV3", SHAPE, **LIMITS, **MTP)
    naive = NaiveModel(config.model, predicts=True)
    controller, executor = strict_controller(config)
    drafter, model, stats = executor.worker.drafter, executor.worker.runner.model, controller.scheduler.stats
    assert isinstance(drafter, Prediction)
    monkeypatch.setattr(drafter._rest, "_patience", 2)
    calls: list[int] = []
    predict = model.predict
    monkeypatch.setattr(model, "predict", lambda hidden, *args, **kw: (
        calls.append(len(hidden)), predict(hidden, *args, **kw))[1])  # fmt: skip
    seen = always(controller)
    greedy = Sampling(temperature=0.0)
    old, new, cached = (NewRequest(id=name, prompt=prompt, max_tokens=40, sampling=greedy) for name, prompt in (
        ("old", [1 + i * i % 9 for i in range(9)]), ("new", [1 + i * i * i % 7 for i in range(11)]),
        ("cached", [1 + i * i % 9 for i in range(9)])))  # fmt: skip
    played = RunResult()

    def steps(count: int) -> None:
        for _ in range(count):
            played.see(controller.step())

    controller.handle([old])
    steps(4)
    assert len(seen) >= 2 and not any(NEVER in ids for ids in seen.values())
    drafts, controller.scheduler.drafts = controller.scheduler.drafts, Drafts()
    steps(4)
    calls.clear()
    steps(8)
    assert calls == [], "it rests"
    controller.scheduler.drafts = drafts
    seen.clear()
    steps(2)
    before = stats.drafted_tokens
    controller.handle([new])
    steps(8)
    assert {id for (name, _), ids in seen.items() if name == "old" for id in ids} == {NEVER}
    mine = {length: ids for (name, length), ids in seen.items() if name == "new" and length > len(new.prompt)}
    assert len(mine) > 2 and stats.drafted_tokens - before == sum(map(len, mine.values()))
    while not controller.idle:
        steps(1)
    controller.handle([cached])
    while not controller.idle:
        steps(1)
    texts = {m.id: [*m.prompt, *played.tokens[m.id]] for m in (old, new, cached)}
    assert texts == {m.id: [*m.prompt, *naive.greedy(m.prompt, 40)] for m in (old, new, cached)}
    for length, ids in mine.items():
        assert ids == drafts_of(naive, texts["new"][:length], len(ids))


def test_a_layer_that_proposes_nothing_keeps_its_state_and_computes_no_logits(
    make_lively: Any, play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_lively("DeepseekV3", SHAPE, **LIMITS, **MTP)
    controller, executor = strict_controller(config)
    calls: list[str] = []
    model = executor.worker.runner.model
    for name, call in (("predict", model.predict), ("predicted", model.predicted)):
        monkeypatch.setattr(model, name, lambda *args, name=name, call=call: (calls.append(name), call(*args))[1])
    always(controller)
    controller.scheduler.drafts._failed = True  # type: ignore[attr-defined]
    play(controller, requests(4)[:1])
    assert calls == ["predict"] * 4


def test_drafts_of_a_request_take_one_more_run_of_the_layer_for_each_token_but_the_first(
    make_lively: Any, play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, executor = strict_controller(make_lively("DeepseekV3", SHAPE, **LIMITS, **MTP))
    model = executor.worker.runner.model
    rows: list[tuple[bool, int]] = []

    def noted(hidden: torch.Tensor, step: Any, own: bool = False) -> torch.Tensor:
        rows.append((own, len(hidden)))
        return predict(hidden, step, own)

    predict = model.predict
    monkeypatch.setattr(model, "predict", noted)
    always(controller)
    message = requests(3)[0]
    play(controller, [message])
    # Of 3 tokens, the first comes with the prompt; the second can have one draft, as the last is not computed.
    assert rows[0] == (False, len(message.prompt)) and rows[1] == (False, 2)
    rows.clear()
    play(controller, [NewRequest(id="more", prompt=message.prompt[::-1], max_tokens=9, sampling=message.sampling)])
    assert rows[1:4] == [(True, 1)] * 3 and rows[4] == (False, 5)


@pytest.mark.parametrize(("family", "changes"), [
    ("Llama", {}), ("DeepseekV3", {"num_nextn_predict_layers": 0}), ("Qwen3Next", {"num_nextn_predict_layers": 0}),
])  # fmt: skip
def test_a_model_without_such_a_layer_is_refused(make_config: Any, family: str, changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="needs a model with a layer for multi-token prediction"):
        build_controller(make_config(family, changes, **LIMITS, **MTP))


def test_a_folder_of_something_else_that_proposes_is_refused(make_config: Any) -> None:
    config = make_config("DeepseekV3", SHAPE, **LIMITS, **MTP, **{"infer.draft_model": "/data/head"})
    with pytest.raises(ConfigError, match=r"proposes tokens without infer\.draft_model; leave one"):
        build_controller(config)


def test_two_ranks_share_the_layer(make_lively: Any, play: Any) -> None:
    shape = {**SHAPE, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = make_lively("DeepseekV3", shape, **{**LIMITS, "executor": "inline"})
    expected = play(build_controller(config)[0], requests()).tokens
    controller, _ = build_controller(replace(config, infer=replace(config.infer, drafter="mtp", tp_size=2)))
    always(controller)
    assert play(controller, requests()).tokens == expected
    assert controller.scheduler.stats.accepted_tokens > 0
    controller.executor.close()
