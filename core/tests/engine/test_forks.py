"""Forks of a running request: the tokens that both share are computed once, and no sampled token changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener_conformance.naive.model import NaiveModel

PROMPT = torch.randint(3, 150, (41,), generator=torch.Generator().manual_seed(2)).tolist()
ANSWER = 9


def samples(forked: bool, count: int = 3, prompt: list[int] = PROMPT) -> list[NewRequest]:
    """Random samples of one prompt, each with a seed of its own."""
    return [
        NewRequest(id=f"r{i}", prompt=prompt, max_tokens=ANSWER, sampling=Sampling(temperature=1.0, seed=i),
                   fork_of="r0" if forked and i else "")
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "step_tokens"),
    [("Gemma3", 7), ("DeepseekV32", 7), ("Qwen3Next", 64), *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        ("Llama", 7), ("Llama", 64), ("Gemma3", 64), ("DeepseekV32", 64), ("Qwen3Next", 7),
    ))],
)  # fmt: skip
def test_forked_samples_compute_the_prompt_once_and_match_unforked_ones(
    family: str, step_tokens: int, make_lively: Any, play: Any, one_thread: None
) -> None:
    config = make_lively(family, **{"infer.step_tokens": step_tokens, "infer.prefix_cache": False})
    controllers = [build_controller(config)[0] for _ in range(2)]
    apart, together = (play(c, samples(forked)) for c, forked in zip(controllers, (False, True), strict=True))
    assert together.tokens == apart.tokens and len(set(map(tuple, apart.tokens.values()))) == 3
    stats = [c.scheduler.stats for c in controllers]
    assert [s.computed_tokens for s in stats] == [3 * (41 + ANSWER - 1), 40 + 3 * ANSWER]
    assert (stats[0].forks, stats[1].forks, stats[1].forked_tokens) == (0, 2, 80)
    assert together.cached == {"r0": 0, "r1": 40, "r2": 40}
    assert controllers[1].scheduler.state.pool.used == 0


def test_a_fork_in_the_middle_of_a_prompt_diverges_from_there(make_lively: Any, play: Any, one_thread: None) -> None:
    config = make_lively("Qwen3Next", **{"infer.step_tokens": 9})
    greedy = Sampling(temperature=0.0)
    other = [*PROMPT[:21], 7, 8, 9]
    messages = [
        NewRequest(id="r0", prompt=PROMPT, max_tokens=ANSWER, sampling=greedy),
        NewRequest(id="r1", prompt=other, max_tokens=ANSWER, sampling=greedy, fork_of="r0"),
    ]
    controller, _ = build_controller(config)
    played = play(controller, messages)
    naive = NaiveModel(config.model, max_positions=128)
    assert played.tokens == {m.id: naive.greedy(m.prompt, ANSWER) for m in messages}
    assert played.cached == {"r0": 0, "r1": 21}


@pytest.mark.parametrize("gone", ["r0", "r1"])
def test_forks_of_an_aborted_parent_run_independently(gone: str, make_lively: Any, play: Any, one_thread: None) -> None:
    config = make_lively("Llama", **{"infer.step_tokens": 7})
    controller, _ = build_controller(config)
    for message in samples(True):
        controller.handle([message])
    controller.step()
    assert [r.waits_for_parent for r in controller.scheduler.waiting] == [True, True]
    controller.scheduler.end(gone, "abort")
    forks = controller.scheduler.stats.forks
    played = play(controller, [NewRequest(id="later", prompt=[5], max_tokens=1)])
    del played.tokens["later"]
    alone = play(build_controller(config)[0], samples(False))
    left = {"r0", "r1", "r2"} - {gone}
    assert played.tokens == {name: alone.tokens[name] for name in left}
    assert controller.scheduler.stats.forks - forks == (0 if gone == "r0" else 1)
    assert controller.scheduler.state.pool.used == 0


def test_a_fork_with_another_salt_or_prompt_logprobs_computes_its_whole_prompt(
    make_lively: Any, play: Any, one_thread: None
) -> None:
    controller, _ = build_controller(make_lively("Llama"))
    first, *others = samples(True)
    scored = Sampling(temperature=0.0, prompt_logprobs=1)
    others = [replace(others[0], cache_salt="tenant"), replace(others[1], sampling=scored)]
    played = play(controller, [first, *others])
    assert controller.scheduler.stats.forks == 0
    assert len(played.prompt_logprobs["r2"]) == len(PROMPT) - 1
