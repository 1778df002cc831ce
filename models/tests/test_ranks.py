"""Ranks that share every layer: tiny random models of every family give transformers' logits on all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_oracles import logits_of
from family_runner import prompt_of
from family_table import Row

from evener.errors import ConfigError
from evener.layers import Builder
from evener_conformance.mirror_communicator import MirrorCommunicator
from evener_conformance.naive.model import NaiveModel, find_architecture
from evener_inspection.thread_communicator import run_on_threads
from evener_models import descriptor

PLAIN_ROPE = {"rope_theta": 20000.0, "rope_type": "default"}
#: Family, ranks, query heads, KV heads (0: as many as query heads), and what else is changed.
CASES: dict[str, tuple[str, int, int, int, dict[str, Any]]] = {
    "llama": ("Llama", 2, 6, 2, {}),
    "llama, uneven in all but heads": ("Llama", 3, 9, 3, {"vocab_size": 209}),
    "llama with biases everywhere, tied": (
        "Llama", 2, 4, 2,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rope_parameters": PLAIN_ROPE}),
    "llama with fewer KV heads than ranks": ("Llama", 4, 8, 2, {"attention_bias": True}),
    "llama with one KV head": ("Llama", 3, 6, 1, {}),
    "mistral": ("Mistral", 2, 4, 2, {}),
    "qwen2": ("Qwen2", 2, 4, 2, {}),
    "qwen2 with fewer KV heads than ranks": ("Qwen2", 4, 4, 2, {}),
    "qwen3": ("Qwen3", 3, 6, 3, {}),
    "mixtral": ("Mixtral", 2, 4, 2, {}),
    "qwen2 moe": ("Qwen2Moe", 2, 4, 1, {}),
    "qwen3 moe": ("Qwen3Moe", 4, 4, 2, {}),
    "glm 4.5": ("Glm4Moe", 2, 4, 2, {}),
    "seed-oss": ("SeedOss", 2, 4, 2, {}),
    "gpt-oss": ("GptOss", 2, 4, 2, {}),
    "gpt-oss with fewer KV heads than ranks": ("GptOss", 4, 4, 2, {"num_local_experts": 3}),
    "llama 4": ("Llama4", 2, 4, 2, {}),
    "gemma": ("Gemma", 2, 4, 1, {}),
    "gemma 2": ("Gemma2", 2, 4, 2, {}),
    "gemma 3": ("Gemma3", 3, 6, 3, {"attention_bias": True}),
    "glm-4 with norms after blocks": ("Glm4", 2, 4, 2, {}),
    "phi": ("Phi", 2, 4, 4, {"qk_layernorm": True}),
    "phi 3, whose projections are fused": ("Phi3", 3, 6, 3, {}),
    "stablelm with a norm for each head": ("StableLm", 3, 3, 3, {"qk_layernorm": True}),
    "starcoder 2": ("Starcoder2", 3, 3, 1, {}),
    "command r+": ("Cohere", 2, 6, 2, {"use_qk_norm": True}),
    "olmo 2, whose norms take all heads": ("Olmo2", 2, 4, 2, {}),
    "olmo 2 with fewer KV heads than ranks": ("Olmo2", 4, 4, 2, {}),
    "deepseek V2": ("DeepseekV2", 2, 4, 0, {}),
    "deepseek V2-Lite": ("DeepseekV2", 3, 3, 0, {"q_lora_rank": None}),
    "deepseek V3": ("DeepseekV3", 4, 4, 0, {}),
    "deepseek V3 with biases": ("DeepseekV3", 2, 4, 0, {"attention_bias": True}),
    "deepseek V3.2": ("DeepseekV32", 2, 4, 0, {}),
    "qwen3-next": ("Qwen3Next", 2, 4, 1, {"linear_num_key_heads": 4, "linear_num_value_heads": 8}),
}  # fmt: skip


#: Changes without which no number of ranks can share a class's tiny config.
EVEN = {"Qwen3NextForCausalLM": {"linear_num_key_heads": 3, "linear_num_value_heads": 6}}


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread a rank."""


def shared(family: str, heads: int, kv_heads: int, changes: dict[str, Any]) -> dict[str, Any]:
    config = find_architecture(f"{family}ForCausalLM").tiny_config()
    hidden = 2 * heads * -(-config["hidden_size"] // (2 * heads))  # which transformers wants
    more = {"num_attention_heads": heads, "num_key_value_heads": kv_heads or heads, "hidden_size": hidden}
    return {**config, **more, **changes}


def ranks_logits(folder: Path | dict[str, Any], ranks: int, ids: list[int], **choices: Any) -> list[torch.Tensor]:
    """Every rank's logits, of a prompt in pieces."""
    return run_on_threads(ranks, lambda end: NaiveModel(folder, communicator=end, **choices).logits(ids, chunk=9))


#: What divides in ways of its own. Each architecture on ranks is compared with one rank below.
QUICK = (
    "llama, uneven in all but heads", "llama with biases everywhere, tied", "gpt-oss with fewer KV heads than ranks",
    "olmo 2 with fewer KV heads than ranks", "phi 3, whose projections are fused", "stablelm with a norm for each head",
    "deepseek V3", "qwen3-next",
)  # fmt: skip


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_every_rank_has_the_logits_of_transformers(case: str, tiny_model: Any) -> None:
    family, ranks, heads, kv_heads, changes = CASES[case]
    model, folder = tiny_model(Row(f"{family}ForCausalLM", shared(family, heads, kv_heads, changes)))
    ids = prompt_of(model.config.vocab_size)
    theirs = logits_of(model)(ids)
    assert theirs.std() > 0.5, "the model is too flat to show a difference"
    for choices in ({}, {"absorb": "absorb"}) if family == "DeepseekV3" else ({},):
        found = ranks_logits(folder, ranks, ids, **choices)
        torch.testing.assert_close(found[0], theirs, atol=2e-4, rtol=2e-4)
        assert all(torch.equal(found[0], other) for other in found[1:])


def smallest(config: dict[str, Any]) -> int:
    """The fewest ranks that can share a model."""
    for size in range(2, 12):
        try:
            find_architecture(config["architectures"][0])(
                config, Builder("float32", 64, communicator=MirrorCommunicator(size))
            )
        except ConfigError:
            continue
        return size
    raise AssertionError("no number of ranks can share it")


@pytest.mark.parametrize("architecture", descriptor.architectures)
def test_ranks_with_slices_of_random_weights_have_the_logits_of_one_rank(architecture: str) -> None:
    config = {**find_architecture(architecture).tiny_config(), **EVEN.get(architecture, {})}
    ids = prompt_of(config.get("text_config", config)["vocab_size"], 12)
    [one], more = ranks_logits(config, 1, ids), ranks_logits(config, smallest(config), ids)
    torch.testing.assert_close(more[0], one, atol=1e-5, rtol=1e-4)
    assert all(torch.equal(more[0], other) for other in more[1:])


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 2,
         "infer.tp_size=2: 9 query heads and 3 KV heads do not come out even; sizes that fit: 1, 3, 9"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 3,
         "infer.tp_size=3: 12 query heads and 4 KV heads do not come out even; sizes that fit: 1, 2, 4, 12"),
        ({"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 5}, 4,
         "infer.tp_size=4: 5 vocabulary entries in units of 2 are too few for so many ranks; sizes that fit: 1, 2, 3"),
        ({"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 3}, 4,
         "infer.tp_size=4: 3 inner features of an MLP in units of 1 are too few for so many ranks; sizes that fit: "
         "1, 2, 3"),
    ],
)  # fmt: skip
def test_layers_that_ranks_cannot_share_are_refused_with_the_sizes_that_fit(
    changes: dict[str, int], ranks: int, message: str
) -> None:
    config = {**find_architecture("LlamaForCausalLM").tiny_config(), **changes}
    with pytest.raises(ConfigError) as error:
        ranks_logits(config, ranks, [1, 2])
    assert str(error.value) == message


def test_ranks_hold_their_share_of_the_bytes_and_no_more() -> None:
    config = shared("Qwen3Moe", 8, 8, {"intermediate_size": 128, "moe_intermediate_size": 64, "vocab_size": 256})
    whole = NaiveModel(config).bytes.allocated
    tables = run_on_threads(4, lambda end: NaiveModel(config, communicator=end).bytes.allocated)
    replicated = 4 * len(tables) * 60_000  # routers, norms and tables
    assert whole < sum(tables) < whole + replicated
    assert max(tables) < 0.4 * whole
