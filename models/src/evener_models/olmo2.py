"""OLMo 2 (OLMo Team 2024): Llama with norms after attention and MLP, none before, and norms of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers.config_json import unsupported
from evener_models.llama import LlamaForCausalLM


class Olmo2ForCausalLM(LlamaForCausalLM):
    """Differs from Llama: RMS norms come after attention and after the MLP, none before; one RMS norm over all query
    heads and one over all key heads. ``clip_qkv`` is not implemented."""

    default_theta = None

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        if config.get("clip_qkv") is not None:
            raise unsupported(config, "clip_qkv", "the published models have none")
        after = {"norm": None, "post_norm": "post_attention_layernorm"}
        return {**super().attention_flags(config), **after, "qk_norm": True, "qk_norm_over": "all"}

    def mlp_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"norm": None, "post_norm": "post_feedforward_layernorm"}

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "vocab_size": 197, "hidden_size": 60,
            "intermediate_size": 78, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
            "hidden_act": "silu", "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
            "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
            "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        }  # fmt: skip
