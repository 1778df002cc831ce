"""GLM-4.5, 4.6 and 4.7 (GLM-4.5 Team 2025): Llama with half-rotated heads, and experts routed as in DeepSeek V3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers import Builder, MLPConfig, MoEConfig
from evener.layers.config_json import activation, read_flag, read_float, read_int
from evener_models.config_values import expert_count, layer_count
from evener_models.llama import LlamaForCausalLM
from evener_models.prediction import NumberedPrediction


class Glm4MoeForCausalLM(NumberedPrediction, LlamaForCausalLM):
    """Differs from Llama: ``partial_rotary_factor`` (default 0.5), ``use_qk_norm``, ``attention_bias``; experts from
    layer ``first_k_dense_replace`` on, weighted by sigmoid scores and chosen with a bias and groups.
    """

    default_theta = None
    default_partial_rotary_factor = 0.5

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        super().__init__(config, build)
        if not self.predicts:  # whatever the config says of it
            build.ignore(rf"model\.layers\.{layer_count(config)}\..*")

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "qkv_bias": read_flag(config, "attention_bias"),
            "qk_norm": read_flag(config, "use_qk_norm"),
        }

    def mlp(self, config: Mapping[str, Any], layer: int) -> MLPConfig | MoEConfig:
        if layer < read_int(config, "first_k_dense_replace", least=0):
            return super().mlp(config, layer)
        inner = read_int(config, "moe_intermediate_size")
        return MoEConfig(
            experts=expert_count(config, "n_routed_experts", "num_local_experts"),
            top=read_int(config, "num_experts_per_tok"),
            inner=inner,
            activation=activation(config),
            scoring="sigmoid",
            groups=read_int(config, "n_group"),
            top_groups=read_int(config, "topk_group"),
            group_best=2,
            renormalize=read_flag(config, "norm_topk_prob", True),
            scale=read_float(config, "routed_scaling_factor"),
            correction="mlp.gate.e_score_correction_bias",
            shared_inner=inner * read_int(config, "n_shared_experts", least=0),
        )

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "vocab_size": 197, "hidden_size": 50,
            "intermediate_size": 70, "num_hidden_layers": 3, "num_attention_heads": 5, "num_key_value_heads": 1,
            "head_dim": 20, "hidden_act": "silu", "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False, "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1,
            "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 22, "n_shared_experts": 2,
            "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "eos_token_id": 2,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        }  # fmt: skip
