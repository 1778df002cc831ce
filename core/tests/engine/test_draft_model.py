"""A draft model: the same tokens with it and without, fewer steps where it is right, and state that is never missing."""

from __future__ import annotations

from typing import Any

import pytest

from evener.engine.controller.controller import Controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener_conformance.reference.executor import strict_controller
from evener_generation.drafting.speculation import Speculation

LIMITS = {"reference.delay": True, "infer.max_reqs": 4, "infer.kv_memory": 2**24, "infer.step_tokens": 16}
TWO_LAYERS = {"num_hidden_layers": 2}


def requests(prefix: str = "") -> list[NewRequest]:
    asked = [Sampling(temperature=0.0), Sampling(temperature=0.8, seed=5), Sampling(temperature=0.0, logprobs=2)]
    return [
        NewRequest(id=f"{prefix}{at}", prompt=[5, 6, 7, 8 + at] * (2 + 3 * at), max_tokens=12 + at, sampling=sampling)
        for at, sampling in enumerate(asked)
    ]


def always(controller: Controller) -> Controller:
    """With drafts in every step, so that tests do not depend on time."""
    drafts = controller.scheduler.drafts
    assert isinstance(drafts, Speculation)
    drafts._payoff = None
    return controller


@pytest.mark.parametrize("depth", [1, 2])
def test_a_model_that_drafts_for_itself_is_always_right(make_lively: Any, play: Any, depth: int) -> None:
    plain = make_lively("Llama", TWO_LAYERS, **LIMITS, **{"infer.depth": depth})
    expected, _ = strict_controller(plain)
    played = play(expected, requests())
    import dataclasses
    config = dataclasses.replace(plain, infer=dataclasses.replace(plain.infer, draft_model=plain.model))
    controller, _ = strict_controller(config)
    again = play(always(controller), requests())
    assert again.tokens == played.tokens
    stats = controller.scheduler.stats
    greedy = stats.drafted_tokens
    assert 0 < stats.accepted_tokens, stats
    print(stats, expected.scheduler.stats.steps)
