"""Phi 1, 1.5 and 2 (Li et al. 2023): layer norms, half-rotated heads, parallel attention and MLP, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers.config_json import read_flag
from evener_models.llama import LlamaForCausalLM


class PhiForCausalLM(LlamaForCausalLM):
    """Differs from Llama: layer norms with bias; one norm for attention and MLP, which run in parallel; an MLP without
    a gate; biases everywhere, in the head too; ``partial_rotary_factor`` (default 0.5); ``qk_layernorm``."""

    names = ("model.embed_tokens", "model.layers", "model.final_layernorm", "lm_head")
    norm = "biased_layer"
    eps_key = "layer_norm_eps"
    head_bias = True
    default_partial_rotary_factor = 0.5

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        normed = {"qk_norm": read_flag(config, "qk_layernorm"), "qk_norms": ("q_layernorm", "k_layernorm")}
        return {"qkv_bias": True, "o_bias": True, "o": "dense", **normed}

    def mlp_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        beside = {"parallel": True, "norm": "input_layernorm"}
        return {"gated": False, "bias": True, "gate_up": ("fc1",), "down": "fc2", **beside}

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["PhiForCausalLM"], "model_type": "phi", "vocab_size": 205, "hidden_size": 60,
            "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3,
            "hidden_act": "gelu_new", "max_position_embeddings": 256, "layer_norm_eps": 1e-5,
            "tie_word_embeddings": False, "qk_layernorm": False, "bos_token_id": 1, "eos_token_id": 2,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        }  # fmt: skip
