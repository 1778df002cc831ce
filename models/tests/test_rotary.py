"""Every scaling of rotary angles gives transformers' angles, for a context as long as the engine's limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evener.layers import Builder
from evener_models.rope import rotary

DIM, MADE_FOR = 20, 64
SHORT, LONG = [1.0 + 0.1 * i for i in range(DIM // 2)], [2.0 + 0.7 * i for i in range(DIM // 2)]
LONGROPE = {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 32}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {"rope_type": "longrope", **LONGROPE},
    "longrope with its factors given": {"rope_type": "longrope", **LONGROPE, "factor": 3.0, "attention_factor": 1.3},
}  # fmt: skip


def table(config: dict[str, Any], length: int) -> torch.Tensor:
    build = Builder("float32", length)
    return rotary(config, DIM, length).table(build, DIM).make(torch.device("cpu"))


@pytest.mark.parametrize("length", [20, 32, 33, 64, 65, 300])
@pytest.mark.parametrize("name", SCALINGS)
def test_angles_are_those_of_transformers_for_a_context_as_long_as_the_limit(name: str, length: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=3 * DIM, num_attention_heads=3, head_dim=DIM, max_position_embeddings=MADE_FOR,
        rope_parameters={"rope_theta": 5000.0, **SCALINGS[name]},
    )  # fmt: skip
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        inverse, factor = 1 / 5000.0 ** (torch.arange(0, DIM, 2) / DIM), 1.0
    else:
        inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    angles = torch.outer(torch.arange(length).float(), inverse)
    ours = {"max_position_embeddings": MADE_FOR, "rope_parameters": {"rope_theta": 5000.0, **SCALINGS[name]}}
    torch.testing.assert_close(table(ours, length), torch.cat((angles.cos(), angles.sin()), dim=-1) * factor)


def test_a_fixed_ntk_factor_makes_theta_larger_once_for_all() -> None:
    config = {"rope_theta": 5000.0, "rope_scaling": {"type": "dynamic", "alpha": 50.0}, "max_position_embeddings": 64}
    larger = {"rope_theta": 5000.0 * 50.0 ** (DIM / (DIM - 2))}
    torch.testing.assert_close(table(config, 100), table(larger, 100))


def test_early_names_of_longrope_mean_the_same() -> None:
    new = {"rope_parameters": {"rope_theta": 1e4, **SCALINGS["longrope"]}, "max_position_embeddings": 64}
    factors = {key: LONGROPE[key] for key in ("short_factor", "long_factor")}
    old = {"rope_theta": 1e4, "rope_scaling": {"type": "su", **factors}, "original_max_position_embeddings": 32}
    assert torch.equal(table({**old, "max_position_embeddings": 64}, 64), table(new, 64))


@pytest.mark.parametrize("length", [300, 5000])
@pytest.mark.parametrize("name", SCALINGS)
def test_rows_that_are_made_in_parts_are_those_of_the_whole_table(name: str, length: int) -> None:
    build = Builder("float32", length)
    config = {"max_position_embeddings": MADE_FOR, "rope_parameters": {"rope_theta": 5000.0, **SCALINGS[name]}}
    made = rotary(config, DIM, length).table(build, DIM)
    starts = range(0, length, 2048)
    parts = [build.rows[made](first, min(first + 2048, length)) for first in starts]
    assert torch.equal(torch.cat(parts), made.make(torch.device("cpu")))
