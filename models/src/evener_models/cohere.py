"""Cohere's Command R and R+: Llama with layer norms without bias, parallel attention and MLP, and scaled logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers.config_json import read_flag, read_float
from evener_models.llama import LlamaForCausalLM


class CohereForCausalLM(LlamaForCausalLM):
    """Differs from Llama: layer norms without bias; one norm for attention and MLP, which run in parallel; interleaved
    rotary pairs; ``logit_scale``; ``use_qk_norm`` (head norms with each head's own weights); the head is tied unless
    the config says otherwise.
    """

    tied = True
    norm = "layer"
    eps_key = "layer_norm_eps"
    interleaved = True

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        normed = {"qk_norm": True, "qk_norm_over": "each"} if read_flag(config, "use_qk_norm") else {}
        return {**super().attention_flags(config), **normed}

    def mlp_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"parallel": True, "norm": "input_layernorm"}

    def logit_scale(self, config: Mapping[str, Any]) -> float:
        return read_float(config, "logit_scale")

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["CohereForCausalLM"], "model_type": "cohere", "vocab_size": 215, "hidden_size": 60,
            "intermediate_size": 90, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 1,
            "hidden_act": "silu", "max_position_embeddings": 256, "layer_norm_eps": 1e-5, "logit_scale": 0.7,
            "tie_word_embeddings": True, "attention_bias": False, "use_qk_norm": False, "bos_token_id": 1,
            "eos_token_id": 2, "pad_token_id": 0, "rope_parameters": {"rope_theta": 8000.0, "rope_type": "default"},
        }  # fmt: skip
