"""Gated delta nets and gated attention in turn, experts with a gated shared one behind each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evener.layers import CausalLM, MLPConfig, MoEConfig, RotaryConfig
from evener.layers.gated_delta import DeltaConfig, GatedAttentionConfig
from evener.layers.config_json import read_int


class AgainForCausalLM(CausalLM):
    """``layer_types`` says which layers attend."""

    norm_offset = 1.0
    oracle = "transformers"

    def attention(self, config: Mapping[str, Any]) -> Sequence[DeltaConfig | GatedAttentionConfig]:
        dim = read_int(config, "head_dim")
        kinds = {
            "full_attention": GatedAttentionConfig(
                heads=read_int(config, "num_attention_heads"),
                kv_heads=read_int(config, "num_key_value_heads"),
                head_dim=dim,
                rotary=RotaryConfig.from_config(config, dim),
            ),
            "linear_attention": DeltaConfig(
                heads=read_int(config, "linear_num_value_heads"),
                key_heads=read_int(config, "linear_num_key_heads"),
                key_dim=read_int(config, "linear_key_head_dim"),
                value_dim=read_int(config, "linear_value_head_dim"),
                width=read_int(config, "linear_conv_kernel_dim"),
            ),
        }
        return [kinds[kind] for kind in config["layer_types"]]

    def mlp(self, config: Mapping[str, Any], layer: int) -> MLPConfig | MoEConfig:
        return MoEConfig(
            experts=read_int(config, "num_experts"),
            top=read_int(config, "num_experts_per_tok"),
            inner=read_int(config, "moe_intermediate_size"),
            renormalize=config["norm_topk_prob"],
            shared_inner=read_int(config, "shared_expert_intermediate_size"),
            shared="mlp.shared_expert",
            shared_gate="mlp.shared_expert_gate",
        )

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["AgainForCausalLM"], "model_type": "again", "vocab_size": 179, "hidden_size": 44,
            "intermediate_size": 66, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
            "head_dim": 12, "hidden_act": "silu", "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False, "attention_bias": False, "linear_conv_kernel_dim": 3,
            "linear_key_head_dim": 8, "linear_value_head_dim": 10, "linear_num_key_heads": 3,
            "linear_num_value_heads": 3, "mlp_only_layers": [], "num_experts": 5, "num_experts_per_tok": 2,
            "moe_intermediate_size": 20, "shared_expert_intermediate_size": 26, "norm_topk_prob": True,
            "decoder_sparse_step": 1, "bos_token_id": 1, "eos_token_id": 2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        }  # fmt: skip
