"""Mixtral (Jiang et al. 2024): Mistral with experts in place of the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers import MLPConfig, MoEConfig
from evener.layers.config_json import activation, read_int
from evener_models.config_values import expert_count
from evener_models.mistral import MistralForCausalLM


class MixtralForCausalLM(MistralForCausalLM):
    """Differs from Mistral: ``num_local_experts`` experts, of which a token uses ``num_experts_per_tok``, weighted by a
    softmax over their logits, so that the weights sum to 1."""

    def mlp(self, config: Mapping[str, Any], layer: int) -> MLPConfig | MoEConfig:
        return MoEConfig(
            experts=expert_count(config, "num_local_experts"),
            top=read_int(config, "num_experts_per_tok"),
            inner=read_int(config, "intermediate_size"),
            activation=activation(config),
            router="block_sparse_moe.gate",
            prefix="block_sparse_moe.experts",
            projections=("w1", "w3", "w2"),
        )

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            **super().tiny_config(), "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
            "num_local_experts": 5, "num_experts_per_tok": 2,
        }  # fmt: skip
