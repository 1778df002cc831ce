"""Stacks of experts in a GGUF file: each matrix is a tensor by its name in a model folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import dequantized

from evener.errors import ArchitectureError, CheckpointError
from evener.loading.checkpoint import open_checkpoint
from evener_formats.gguf.scheme import GgufScheme

Write = Callable[..., Path]
EXPERTS, WIDTH, INNER, VOCAB = 5, 256, 512, 259
KEYS = {
    "context_length": 128, "embedding_length": WIDTH, "block_count": 1, "feed_forward_length": 768,
    "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-6, "expert_count": EXPERTS,
    "expert_used_count": 2, "expert_feed_forward_length": INNER,
}  # fmt: skip
SHAPES = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
#: Family, its architecture, and names in a folder of the router and of an expert's matrices.
FAMILIES = [
    ("qwen3moe", "Qwen3MoeForCausalLM", "mlp.gate", "mlp.experts.{}.{}_proj", {}),
    ("llama", "MixtralForCausalLM", "block_sparse_moe.gate", "block_sparse_moe.experts.{}.{}",
     {"gate": "w1", "up": "w3", "down": "w2"}),
]  # fmt: skip


def drawn(experts: int = EXPERTS) -> dict[str, torch.Tensor]:
    tensors = {f"blk.0.ffn_{part}_exps.weight": torch.randn(experts, *shape) for part, shape in SHAPES.items()}
    router = {"blk.0.ffn_gate_inp.weight": torch.randn(experts, WIDTH)}
    return {"token_embd.weight": torch.randn(VOCAB, WIDTH), **router, **tensors}


@pytest.mark.parametrize(
    ("family", "architecture", "router", "name", "words", "kind"),
    [pytest.param(*names, kind, marks=[] if (number, kind) in ((0, "MXFP4"), (1, "Q4_K")) else pytest.mark.slow)
     for number, names in enumerate(FAMILIES) for kind in ("F32", "Q8_0", "Q4_K", "Q6_K", "MXFP4")],
)  # fmt: skip
def test_every_expert_is_a_tensor_with_its_part_of_the_stack(
    family: str, architecture: str, router: str, name: str, words: dict[str, str], kind: str, write_gguf: Write
) -> None:
    own = drawn()
    path = write_gguf(family, KEYS, own, lambda stored: "F32" if "gate_inp" in stored else kind)
    checkpoint, scheme = open_checkpoint(path), GgufScheme()
    assert checkpoint.architecture == architecture
    # One of MXFP4 is two tensors, the experts' and of the embedding.
    assert len(checkpoint.headers) == (2 + 3 * EXPERTS if kind != "MXFP4" else 1 + 2 * (1 + 3 * EXPERTS))
    assert torch.equal(checkpoint.tensor(f"model.layers.0.{router}.weight"), own["blk.0.ffn_gate_inp.weight"])
    for part in SHAPES:
        stack = own[f"blk.0.ffn_{part}_exps.weight"]
        for expert in range(EXPERTS):
            stored = f"model.layers.0.{name.format(expert, words.get(part, part))}.weight"
            found = scheme.part(stored, checkpoint.headers)
            assert found is not None and (found.rows, found.columns) == SHAPES[part]
            roles = scheme.tensors(stored, checkpoint.headers)
            tensors = {role: checkpoint.tensor(name) for role, name in roles.items()}
            filled = type(found)(stored, *SHAPES[part], found.format, tensors)
            want = stack[expert] if kind == "F32" else dequantized(stack[expert], kind)
            assert torch.equal(scheme.dequantize(filled, "float32"), want)


def test_the_config_says_how_many_experts_there_are_and_how_they_are_chosen(write_gguf: Write) -> None:
    qwen = open_checkpoint(write_gguf("qwen3moe", KEYS, drawn(), "Q8_0")).config
    expected = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER,
                "norm_topk_prob": True, "intermediate_size": 768, "model_type": "qwen3_moe"}  # fmt: skip
    assert {key: qwen[key] for key in expected} == expected
    mixtral = open_checkpoint(write_gguf("llama", KEYS, drawn(), "Q8_0")).config
    assert (mixtral["num_local_experts"], mixtral["num_experts_per_tok"]) == (EXPERTS, 2)
    assert mixtral["sliding_window"] is None and mixtral["model_type"] == "mixtral"


@pytest.mark.parametrize(
    ("keys", "experts", "words"),
    [
        ({"expert_count": 6}, EXPERTS, r"\[5, 512, 256\], and the file says that a layer has 6 experts"),
        ({"expert_count": 2**31}, EXPERTS, "a layer has 2147483648 experts"),
        ({"expert_count": 0}, EXPERTS, "has 0 for qwen3moe.expert_count"),
    ],
)
def test_a_stack_of_another_number_of_experts_is_refused(
    keys: dict[str, Any], experts: int, words: str, write_gguf: Write
) -> None:
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(write_gguf("qwen3moe", KEYS | keys, drawn(experts)))


def test_a_matrix_in_the_place_of_a_stack_is_refused(write_gguf: Write) -> None:
    tensors = {**drawn(), "blk.0.ffn_up_exps.weight": torch.randn(EXPERTS, WIDTH)}
    with pytest.raises(CheckpointError, match=r"ffn_up_exps.weight is float32 \[5, 256\], and the file says"):
        open_checkpoint(write_gguf("qwen3moe", KEYS, tensors))


def test_too_many_experts_are_refused_before_they_are_listed(
    write_gguf: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evener_formats.gguf.checkpoint._MOST_TENSORS", 12)
    with pytest.raises(CheckpointError, match="a layer has 5 experts; fetch the file again"):
        open_checkpoint(write_gguf("qwen3moe", KEYS, drawn()))


def test_experts_of_another_family_are_refused(write_gguf: Write) -> None:
    with pytest.raises(ArchitectureError, match="a qwen2 with 5 experts, which is not implemented for GGUF"):
        _ = open_checkpoint(write_gguf("qwen2", KEYS, drawn())).config


def test_the_gate_of_a_shared_expert_is_a_matrix_of_one_row(write_gguf: Write) -> None:
    keys = {**KEYS, "expert_shared_feed_forward_length": 384}
    gate = torch.randn(WIDTH)
    found = open_checkpoint(write_gguf("qwen2moe", keys, {**drawn(), "blk.0.ffn_gate_inp_shexp.weight": gate}))
    assert torch.equal(found.tensor("model.layers.0.mlp.shared_expert_gate.weight"), gate[None])
    expected = {"shared_expert_intermediate_size": 384, "norm_topk_prob": False, "qkv_bias": False}
    assert {key: found.config[key] for key in expected} == expected
    wrong = {**drawn(), "blk.0.ffn_gate_inp_shexp.weight": torch.randn(2, WIDTH)}
    with pytest.raises(CheckpointError, match=r"float32 \[2, 256\], not as a vector of numbers; fetch the file again"):
        open_checkpoint(write_gguf("qwen2moe", keys, wrong))


LATENT = {
    "context_length": 4096, "embedding_length": WIDTH, "block_count": 2, "feed_forward_length": 768,
    "attention.head_count": 4, "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.q_lora_rank": 48, "attention.kv_lora_rank": 64, "attention.key_length": 64 + 16,
    "attention.value_length": 64, "attention.key_length_mla": 32 + 16, "attention.value_length_mla": 24,
    "rope.dimension_count": 16, "expert_count": EXPERTS, "expert_used_count": 2, "expert_shared_count": 1,
    "expert_feed_forward_length": INNER, "leading_dense_block_count": 1, "expert_weights_scale": 2.5,
    "expert_weights_norm": True, "expert_gating_func": 2, "expert_group_count": 5, "expert_group_used_count": 3,
    "rope.scaling.type": "yarn", "rope.scaling.factor": 40.0, "rope.scaling.original_context_length": 4096,
    "rope.scaling.yarn_log_multiplier": 0.1,
}  # fmt: skip


def parts() -> dict[str, torch.Tensor]:
    """The up-projection of keys and values in two parts, as files have it since 2025."""
    return {"token_embd.weight": torch.randn(VOCAB, WIDTH), "blk.0.attn_k_b.weight": torch.randn(4, 64, 32),
            "blk.0.attn_v_b.weight": torch.randn(4, 24, 64)}  # fmt: skip


def test_the_config_of_deepseek_is_that_of_its_folder(write_gguf: Write) -> None:
    path = write_gguf("deepseek2", LATENT, {**parts(), "blk.1.exp_probs_b.bias": torch.ones(EXPERTS)})
    checkpoint = open_checkpoint(path)
    expected = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4,
        "kv_lora_rank": 64, "q_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24,
        "first_k_dense_replace": 1, "moe_intermediate_size": INNER, "n_routed_experts": EXPERTS,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
        "n_group": 5, "topk_group": 3, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "rope_scaling": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
                         "mscale_all_dim": 1.0},
    }  # fmt: skip
    assert {key: checkpoint.config.get(key) for key in expected} == expected
    assert checkpoint.headers["model.layers.1.mlp.gate.e_score_correction_bias"] == ("float32", (EXPERTS,))


def test_deepseek_v2_is_told_by_its_softmax(write_gguf: Write) -> None:
    older = {"attention.key_length": 48, "attention.value_length": 24, "expert_gating_func": 1}
    keys = {k: v for k, v in LATENT.items() if not k.endswith("_mla") and "group" not in k and "norm" not in k[8:]}
    config = open_checkpoint(write_gguf("deepseek2", keys | older | {
        "attention.layer_norm_rms_epsilon": 1e-6}, parts())).config  # fmt: skip
    assert config["architectures"] == ["DeepseekV2ForCausalLM"] and config["topk_method"] == "greedy"
    assert (config["qk_nope_head_dim"], config["v_head_dim"], config["norm_topk_prob"]) == (32, 24, False)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "MXFP4"])
def test_keys_and_values_in_two_parts_are_one_weight(kind: str, write_gguf: Write) -> None:
    own = parts()
    checkpoint = open_checkpoint(write_gguf("deepseek2", LATENT, own, kind))
    keys, values = (
        own[f"blk.0.attn_{part}_b.weight"] if kind == "F32" else dequantized(own[f"blk.0.attn_{part}_b.weight"], kind)
        for part in "kv"
    )
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    assert checkpoint.headers[name] == ("float32", (4 * (32 + 24), 64)) and name in checkpoint.copied
    found = checkpoint.tensor(name).unflatten(0, (4, 32 + 24))
    assert torch.equal(found[:, :32], keys.transpose(1, 2)) and torch.equal(found[:, 32:], values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"blk.0.attn_v_b.weight": None}, "lacks the tensor blk.0.attn_v_b.weight"),
        ({"blk.0.attn_v_b.weight": torch.ones(4, 24, 32)}, "they are no keys and values of the same heads"),
        ({"blk.0.attn_k_b.weight": torch.ones(64, 32)}, "they are no keys and values of the same heads"),
        ({"blk.0.attn_kv_b.weight": torch.ones(224, 64)}, "as a whole and in parts"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    change: dict[str, torch.Tensor | None], words: str, write_gguf: Write
) -> None:
    tensors = {name: tensor for name, tensor in (parts() | change).items() if tensor is not None}
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(write_gguf("deepseek2", LATENT, tensors))


@pytest.mark.parametrize("value", ["a tenth", float("nan")])
def test_a_wrong_value_of_yarn_is_refused_by_its_key(value: Any, write_gguf: Write) -> None:
    key = "rope.scaling.yarn_log_multiplier"
    with pytest.raises(CheckpointError, match=f"deepseek2.{key}; fetch the file again"):
        _ = open_checkpoint(write_gguf("deepseek2", LATENT | {key: value}, parts())).config


@pytest.mark.parametrize("change", [{"attention.key_length_mla": 16}, {"attention.key_length_mla": 8}])
def test_heads_that_are_not_wider_than_their_rotated_part_are_refused(
    change: dict[str, Any], write_gguf: Write
) -> None:
    with pytest.raises(CheckpointError, match=r"has \d+ for deepseek2\.attention\.key_length"):
        _ = open_checkpoint(write_gguf("deepseek2", LATENT | change, parts())).config
