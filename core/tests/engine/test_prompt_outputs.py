"""Hidden states and logits of prompt tokens equal those of the naive engine, however a prompt is chunked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from evener.contracts.outputs import PromptOutputs
from evener.engine.wire.messages import NewRequest, Sampling
from evener_conformance.naive.model import NaiveModel, NaiveStep, find_architecture
from evener_conformance.reference.executor import strict_controller

DELAYED = {"reference.delay": True}
ONE_LAYER = {"num_hidden_layers": 1}
PROMPT = [7 * i % 200 + 1 for i in range(70)]
SOME = [(0, 3), (17, 18), (40, 69)]


def asks(name: str, kind: Any, ranges: Any, prompt: list[int] = PROMPT, max_tokens: int = 1) -> NewRequest:
    outputs = None if kind is None else PromptOutputs(kind, ranges)
    return NewRequest(
        id=name, prompt=prompt, max_tokens=max_tokens, sampling=Sampling(temperature=0.0, prompt_outputs=outputs)
    )


def expected(kind: str, prompt: list[int], ranges: Any) -> torch.Tensor:
    model = NaiveModel({**find_architecture("LlamaForCausalLM").tiny_config(), **ONE_LAYER}, max_positions=128)
    step: list[Any] = []
    forward = model.model.forward

    def watched(given: NaiveStep) -> torch.Tensor:
        step.append(forward(given))
        return step[-1]

    model.model.forward = watched  # type: ignore[assignment]
    logits = model.logits(prompt)
    hidden = step[0]
    # The norm, written out: RMS with the weight of the dummy model.
    rms = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + model.config["rms_norm_eps"])
    rows = {"hidden": hidden, "normed": rms * model.model.head.norm.value, "logits": logits}[kind]
    return torch.cat([rows[first:end] for first, end in ranges]).float()


def check(found: bytes, kind: str, prompt: list[int], ranges: Any) -> None:
    wanted = expected(kind, prompt, ranges)
    rows = torch.from_numpy(np.frombuffer(found, dtype=np.float32).copy()).view(-1, wanted.shape[1])
    torch.testing.assert_close(rows, wanted)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_rows_of_a_prompt_are_those_of_the_naive_engine_in_chunks_beside_others(
    make_config: Any, play: Any, depth: int
) -> None:
    controller, _ = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED, **{"infer.depth": depth}))
    messages = [
        asks("hidden", "hidden", SOME), asks("normed", "normed", [(0, 70)]), asks("logits", "logits", SOME),
        asks("none", None, [], PROMPT[:50], 5), asks("one", "logits", [(0, 1)], [9], 3), asks("empty", "hidden", []),
    ]  # fmt: skip
    played = play(controller, messages, arrivals={"normed": 2, "logits": 5})
    check(played.pooled["hidden"], "hidden", PROMPT, SOME)
    check(played.pooled["normed"], "normed", PROMPT, [(0, 70)])
    check(played.pooled["logits"], "logits", PROMPT, SOME)
    check(played.pooled["one"], "logits", [9], [(0, 1)])
    assert played.pooled["none"] == played.pooled["empty"] == b""
    # They generate as others do.
    assert [len(played.tokens[m.id]) for m in messages] == [1, 1, 1, 5, 3, 1]
    assert controller.idle and controller.scheduler.state.pool.used == 0


def test_rows_bypass_the_prefix_cache(make_config: Any, play: Any) -> None:
    controller, _ = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED))
    play(controller, [asks("first", None, [])])
    played = play(controller, [asks("rows", "hidden", [(0, 2)]), asks("plain", None, [])])
    assert played.cached["rows"] == 0 and played.cached["plain"] > 0
    check(played.pooled["rows"], "hidden", PROMPT, [(0, 2)])


def test_preemption_does_not_repeat_rows(make_config: Any, play: Any, shrink_pool: Any) -> None:
    controller, _ = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED))
    shrink_pool(controller, 6)
    messages = [asks(name, "hidden", [(0, 20), (25, 31)], [ord(name), *range(30)], 30) for name in "abc"]
    played = play(controller, messages)
    assert controller.scheduler.stats.preemptions > 0
    for message in messages:
        check(played.pooled[message.id], "hidden", message.prompt, [(0, 20), (25, 31)])
        assert len(played.tokens[message.id]) == 30
