"""Mixtral: Mistral with experts in place of the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers import MLPConfig, MoEConfig
from evener.layers.settings import activation, count
from evener_models.mistral import MistralForCausalLM


class MixtralForCausalLM(MistralForCausalLM):
    """``num_local_experts``, ``num_experts_per_tok``; the weights of the chosen experts sum to 1."""

    def mlp(self, config: Mapping[str, Any], layer: int) -> MLPConfig | MoEConfig:
        return MoEConfig(
            experts=count(config, "num_local_experts"),
            top=count(config, "num_experts_per_tok"),
            inner=count(config, "intermediate_size"),
            activation=activation(config),
            router="block_sparse_moe.gate",
            at="block_sparse_moe.experts",
            projections=("w1", "w3", "w2"),
        )

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            **super().tiny_config(), "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
            "num_local_experts": 5, "num_experts_per_tok": 2,
        }  # fmt: skip
