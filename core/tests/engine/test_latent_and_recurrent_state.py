"""Latent, index and recurrent state: the engine gives the tokens of the naive engine, in mixed batches, with prefix
hits, under preemption and at any depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import ConfigError
from evener_conformance.naive.model import NaiveModel

GREEDY = Sampling(temperature=0.0)
#: Family, options, and what the naive engine's builder has to be told.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "latent": ("DeepseekV3", {}, {}),
    "latent, expanded": ("DeepseekV3", {"infer.mla_absorb": "none"}, {"absorb": "none"}),
    "latent, with products": ("DeepseekV3", {"infer.mla_absorb": "absorb"}, {"absorb": "absorb"}),
    "latent, queries direct": ("DeepseekV2", {"infer.depth": 3}, {}),
    "latent in bf16, expanded": (
        "DeepseekV3",
        {"infer.kv_dtype": "bfloat16", "infer.mla_absorb": "none"},
        {"state_dtype": "bfloat16", "absorb": "none"},
    ),
    "latent in 8 bits, with products": (
        "DeepseekV3",
        {"infer.kv_dtype": "fp8_e4m3", "infer.mla_absorb": "absorb"},
        {"state_dtype": "float8_e4m3fn", "absorb": "absorb"},
    ),
    "latent in 8 bits": ("DeepseekV3", {"infer.kv_dtype": "fp8_e4m3"}, {"state_dtype": "float8_e4m3fn"}),
    "sparse": ("DeepseekV32", {"infer.step_tokens": 7}, {}),
    "sparse, fewer tokens": ("DeepseekV32", {"infer.index_topk": 3}, {"index_top": 3}),
    "sparse, read densely": ("DeepseekV32", {"infer.index_topk": 0}, {"index_top": 0}),
    "recurrent": ("Qwen3Next", {"infer.snapshot_every": 16}, {}),
    "recurrent, snapshots apart": ("Qwen3Next", {"infer.snapshot_every": 32, "infer.step_tokens": 9}, {}),
}


def requests() -> list[NewRequest]:
    noise = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 150, (length,), generator=noise).tolist() for length in (40, 7, 33, 1, 50, 18)]
    prompts.append(prompts[0] + [5, 6, 7])
    return [NewRequest(id=f"r{i}", prompt=p, max_tokens=12, sampling=GREEDY) for i, p in enumerate(prompts)]


#: What other cases have too, each with something else beside it.
ALONE = (
    "latent", "latent, queries direct", "latent, expanded", "latent, with products", "latent in bf16, expanded",
    "latent in 8 bits", "latent in 8 bits, with products", "sparse, fewer tokens", "sparse, read densely", "recurrent",
)  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in ALONE else c for c in CASES])
def test_tokens_match_the_naive_engine(
    case: str, make_lively: Any, play: Any, shrink_pool: Any, one_thread: None
) -> None:
    family, options, choices = CASES[case]
    config = make_lively(family, **options)
    alone, messages = NaiveModel(config.model, max_positions=128, **choices), requests()
    expected = {m.id: alone.greedy(m.prompt, m.max_tokens) for m in messages}
    controller, _ = build_controller(config)
    # The last request comes when the first one's prompt is known.
    whole = play(controller, messages, arrivals={"r6": 60})
    assert whole.tokens == expected and set(whole.reasons().values()) == {"length"}
    assert whole.cached["r6"] == 32
    least = controller.scheduler.state.slabs_for(62, controller.scheduler.step_tokens)
    tight, _ = build_controller(config)
    shrink_pool(tight, least)
    assert play(tight, messages).tokens == expected
    assert tight.scheduler.stats.preemptions > 0 and tight.scheduler.state.pool.used == 0


def test_snapshot_every_must_be_a_multiple_of_the_block_size(make_config: Any) -> None:
    with pytest.raises(ConfigError, match=r"infer\.snapshot_every=40 must be a multiple of the block size, 16 tokens"):
        build_controller(make_config("Qwen3Next", **{"infer.snapshot_every": 40}))
