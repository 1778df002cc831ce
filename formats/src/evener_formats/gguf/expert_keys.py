"""What a GGUF file says of experts, of their choice and of latent attention: keys of a family, from ``config.json``.
Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener_formats.gguf.families import Deepseek2, GptOss, Llama

#: llama.cpp's numbers of the functions that make weights of a router's logits (``llama_expert_gating_func_type``).
_SCORES: Mapping[str, int] = {"softmax": 1, "sigmoid": 2}


def expert_keys(family: type[Llama], config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a family with experts, without its name before them; none of another family."""
    if not family.experts:
        return {}
    # A library may have saved the number under the name that most families have.
    count = config[family.experts if family.experts in config else "num_local_experts"]
    keys: dict[str, Any] = {"expert_count": count, "expert_used_count": config["num_experts_per_tok"]}
    for key, name in (
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ):
        if config.get(name) is not None:
            keys[key] = config[name]
    if issubclass(family, GptOss):
        keys |= {"expert_feed_forward_length": config["intermediate_size"],
                 "attention.sliding_window": config["sliding_window"]}  # fmt: skip
    return keys | _latent_keys(config) if issubclass(family, Deepseek2) else keys


def _latent_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek's. llama.cpp sees its latent attention as heads that share one wide key and value."""
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    # V2 says neither how its scores are made nor, in its older configs, that they are not grouped.
    sigmoid = config.get("topk_method") == "noaux_tc" or config["architectures"][0] == "DeepseekV3ForCausalLM"
    keys: dict[str, Any] = {
        "attention.head_count_kv": 1, "attention.kv_lora_rank": rank, "attention.key_length": rank + rotated,
        "attention.value_length": rank, "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"], "rope.dimension_count": rotated,
        "leading_dense_block_count": config.get("first_k_dense_replace") or 0,
        "expert_shared_count": config.get("n_shared_experts") or 0,
        "expert_gating_func": _SCORES["sigmoid" if sigmoid else "softmax"],
    }  # fmt: skip
    if config.get("q_lora_rank") is not None:
        keys["attention.q_lora_rank"] = config["q_lora_rank"]
    if config.get("routed_scaling_factor") is not None:
        keys["expert_weights_scale"] = float(config["routed_scaling_factor"])
    if config.get("norm_topk_prob", sigmoid):
        keys["expert_weights_norm"] = True
    if sigmoid or config.get("topk_method") == "group_limited_greedy":
        keys |= {"expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"]}
    return keys
