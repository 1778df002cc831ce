"""Qwen 2 and Qwen 3 with experts (Yang et al. 2024 and 2025). Qwen 2 also has a shared expert with a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers import MLPConfig, MoEConfig
from evener.layers.config_json import activation, read_flag, read_int
from evener_models.config_values import expert_count, read_list
from evener_models.qwen2 import Qwen2ForCausalLM
from evener_models.qwen3 import Qwen3ForCausalLM


def experts(config: Mapping[str, Any], layer: int, **extra: Any) -> MoEConfig | None:
    """The experts of a layer; None if ``mlp_only_layers`` or ``decoder_sparse_step`` makes it an MLP."""
    every = read_int({"decoder_sparse_step": 1, **config}, "decoder_sparse_step")
    if layer in read_list(config, "mlp_only_layers", int) or (layer + 1) % every:
        return None
    return MoEConfig(
        experts=expert_count(config, "num_experts", "num_local_experts"),
        top=read_int(config, "num_experts_per_tok"),
        inner=read_int(config, "moe_intermediate_size"),
        activation=activation(config),
        renormalize=read_flag(config, "norm_topk_prob"),
        **extra,
    )


class Qwen2MoeForCausalLM(Qwen2ForCausalLM):
    """Qwen 1.5 MoE and Qwen 2 57B-A14B. Differs from Qwen 2: experts, a shared expert with a gate, ``qkv_bias``."""

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"qkv_bias": read_flag(config, "qkv_bias", True)}

    def mlp(self, config: Mapping[str, Any], layer: int) -> MLPConfig | MoEConfig:
        shared = read_int(config, "shared_expert_intermediate_size")
        extra = {"shared_inner": shared, "shared": "mlp.shared_expert", "shared_gate": "mlp.shared_expert_gate"}
        return experts(config, layer, **extra) or super().mlp(config, layer)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            **super().tiny_config(), "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe",
            "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "use_sliding_window": False,
            "shared_expert_intermediate_size": 44, "norm_topk_prob": False, "decoder_sparse_step": 1,
            "mlp_only_layers": [1], "num_key_value_heads": 1,
        }  # fmt: skip


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen 3 30B-A3B and 235B-A22B. Differs from Qwen 3: experts, without a shared one."""

    def mlp(self, config: Mapping[str, Any], layer: int) -> MLPConfig | MoEConfig:
        return experts(config, layer) or super().mlp(config, layer)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            **super().tiny_config(), "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
            "num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 26, "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
        }  # fmt: skip
