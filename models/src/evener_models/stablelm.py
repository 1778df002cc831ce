"""StableLM 3B and 2 (Bellagente et al. 2024): Llama with layer norms and a quarter of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers.config_json import read_flag
from evener_models.llama import LlamaForCausalLM


class StableLmForCausalLM(LlamaForCausalLM):
    """Differs from Llama: layer norms with bias; ``partial_rotary_factor`` (default 0.25); ``use_qkv_bias``;
    ``qk_layernorm`` (layer norms of query and key heads, each head with its own weights); ``use_parallel_residual``
    (attention and MLP run in parallel after one norm)."""

    norm = "biased_layer"
    eps_key = "layer_norm_eps"
    default_partial_rotary_factor = 0.25

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        norms = ("q_layernorm.norms.{}", "k_layernorm.norms.{}")
        normed = {"qk_norm": read_flag(config, "qk_layernorm"), "qk_norm_over": "each", "qk_norms": norms}
        return {"qkv_bias": read_flag(config, "use_qkv_bias"), **(normed if normed["qk_norm"] else {})}

    def mlp_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"parallel": True, "norm": "input_layernorm"} if read_flag(config, "use_parallel_residual") else {}

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "vocab_size": 209, "hidden_size": 72,
            "intermediate_size": 90, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 1,
            "hidden_act": "silu", "max_position_embeddings": 256, "layer_norm_eps": 1e-5,
            "tie_word_embeddings": False, "use_qkv_bias": True, "qk_layernorm": False, "use_parallel_residual": False,
            "bos_token_id": 1, "eos_token_id": 2,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25},
        }  # fmt: skip
