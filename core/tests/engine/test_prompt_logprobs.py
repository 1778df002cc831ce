"""Log-probabilities of prompt tokens equal those of the naive engine, however a prompt is chunked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evener.engine.wire.messages import NewRequest, Sampling
from evener_conformance.naive.model import NaiveModel, find_architecture
from evener_conformance.reference.executor import strict_controller

DELAYED = {"reference.delay": True}
ONE_LAYER = {"num_hidden_layers": 1}
PROMPT = [7 * i % 200 + 1 for i in range(70)]


def asks(name: str, prompt: list[int], max_tokens: int = 4, **fields: Any) -> NewRequest:
    sampling = Sampling(temperature=0.0, **{"prompt_logprobs": 3, **fields})
    return NewRequest(id=name, prompt=prompt, max_tokens=max_tokens, sampling=sampling)


def check(found: list[Any], prompt: list[int]) -> None:
    """``found`` has an entry for each token but the first, of the naive engine's distribution."""
    model = NaiveModel({**find_architecture("LlamaForCausalLM").tiny_config(), **ONE_LAYER}, max_positions=128)
    rows = model.logits(prompt)[:-1].float().log_softmax(-1)
    assert [entry.ids[0] for entry in found] == prompt[1:]
    values = torch.tensor([entry.values[0] for entry in found])
    torch.testing.assert_close(values, rows.gather(1, torch.tensor(prompt[1:])[:, None]).squeeze(1))
    for entry, row in zip(found, rows, strict=True):
        assert entry.values[1:] == pytest.approx(row.topk(len(entry.values) - 1).values.tolist(), abs=1e-5)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_prompt_token_is_scored_once_in_chunks_beside_others(make_config: Any, play: Any, depth: int) -> None:
    controller, _ = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED, **{"infer.depth": depth}))
    messages = [
        asks("a", PROMPT), asks("b", [*PROMPT[:40], 3, 4]), asks("none", PROMPT[:50], prompt_logprobs=None),
        asks("zero", PROMPT[5:30], prompt_logprobs=0), asks("one", [9]),
    ]  # fmt: skip
    played = play(controller, messages, arrivals={"b": 5, "none": 9})
    for message in messages[:2] + messages[3:4]:
        check(played.prompt_logprobs[message.id], message.prompt)
    assert played.prompt_logprobs["none"] == played.prompt_logprobs["one"] == []
    assert {len(tokens) for tokens in played.tokens.values()} == {4}


def test_prompt_logprobs_bypass_the_prefix_cache(make_config: Any, play: Any) -> None:
    controller, _ = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED))
    first = play(controller, [asks("first", PROMPT, prompt_logprobs=None)])
    played = play(controller, [asks("scored", PROMPT), asks("not", PROMPT, prompt_logprobs=None)])
    assert played.cached["scored"] == 0 and played.cached["not"] > 0
    check(played.prompt_logprobs["scored"], PROMPT)
    assert played.tokens["scored"] == played.tokens["not"] == first.tokens["first"]


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_preemption_does_not_repeat_prompt_logprobs(make_config: Any, play: Any, shrink_pool: Any, depth: int) -> None:
    controller, _ = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED, **{"infer.depth": depth}))
    shrink_pool(controller, 6)
    messages = [asks(name, [ord(name), *range(30)], max_tokens=30) for name in "abc"]
    played = play(controller, messages)
    assert controller.scheduler.stats.preemptions > 0
    for message in messages:
        check(played.prompt_logprobs[message.id], message.prompt)
        assert len(played.tokens[message.id]) == 30


def test_a_request_gets_the_log_probabilities_of_the_ids_that_it_names(make_config: Any, play: Any) -> None:
    controller, _ = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED))
    asked: dict[str, dict[str, Any]] = {
        "named": {"logprobs": 0, "logprob_ids": [5, 9, 200]}, "one": {"logprobs": 0, "logprob_ids": [7]},
        "likeliest": {"logprobs": 2}, "none": {},
    }  # fmt: skip
    messages = [asks(name, PROMPT[:10], prompt_logprobs=None, **fields) for name, fields in asked.items()]
    played = play(controller, messages)
    model = NaiveModel({**find_architecture("LlamaForCausalLM").tiny_config(), **ONE_LAYER}, max_positions=128)
    tokens = played.tokens["named"]
    rows = model.logits([*PROMPT[:10], *tokens])[9:-1].float().log_softmax(-1)
    for name, fields in asked.items():
        ids = fields.get("logprob_ids")
        assert len(played.logprobs[name]) == (4 if "logprobs" in fields else 0)
        for entry, row, token in zip(played.logprobs[name], rows, tokens, strict=False):
            assert entry.ids == [token, *(ids or row.topk(2).indices.tolist())]
            assert entry.values == pytest.approx(row[entry.ids].tolist(), abs=1e-5)


def test_aborting_during_prompt_logprobs_releases_everything(make_config: Any, play: Any) -> None:
    controller, _ = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED))
    play(controller, [asks("gone", PROMPT), asks("stays", PROMPT[:20])], aborts={"gone": 0})
    assert controller.idle and controller.scheduler.state.pool.used == 0
