"""GLM-4 dense, 9B and 32B (GLM Team 2024): Llama with interleaved rotary pairs on half a head, fused gate and up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers.config_json import read_flag
from evener_models.llama import LlamaForCausalLM


class GlmForCausalLM(LlamaForCausalLM):
    """GLM-4-9B and GLM-Edge. Differs from Llama: interleaved rotary pairs on ``partial_rotary_factor`` of a head
    (default 0.5); ``attention_bias`` on queries, keys and values (default true); gate and up are one tensor.
    """

    default_partial_rotary_factor = 0.5
    interleaved = True

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"qkv_bias": read_flag(config, "attention_bias", True)}

    def mlp_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"gate_up": ("gate_up_proj",)}

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["GlmForCausalLM"], "model_type": "glm", "vocab_size": 201, "hidden_size": 50,
            "intermediate_size": 70, "num_hidden_layers": 3, "num_attention_heads": 5, "num_key_value_heads": 1,
            "head_dim": 20, "hidden_act": "silu", "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False, "attention_bias": True, "eos_token_id": 2, "pad_token_id": 0,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        }  # fmt: skip


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4-0414 and GLM-Z1. Differs from GLM-4-9B: norms after attention and after the MLP too."""

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().attention_flags(config), "post_norm": "post_self_attn_layernorm"}

    def mlp_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().mlp_flags(config), "post_norm": "post_mlp_layernorm"}

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {**super().tiny_config(), "architectures": ["Glm4ForCausalLM"], "model_type": "glm4"}
