"""Qwen 3 (Yang et al. 2025): Qwen 2 with norms of query and key heads, and without biases by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers import AttentionConfig
from evener.layers.config_json import read_flag, require
from evener_models.qwen2 import Qwen2ForCausalLM


class Qwen3ForCausalLM(Qwen2ForCausalLM):
    """Differs from Qwen 2: an RMS norm of each query and key head; ``attention_bias`` (default false); ``head_dim`` is
    required."""

    def attention(self, config: Mapping[str, Any]) -> list[AttentionConfig]:
        require(config, "head_dim")
        return super().attention(config)

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        bias = read_flag(config, "attention_bias")
        return {"qkv_bias": bias, "o_bias": bias, "qk_norm": True}

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 199, "hidden_size": 50,
            "intermediate_size": 70, "num_hidden_layers": 2, "num_attention_heads": 5, "num_key_value_heads": 1,
            "head_dim": 18, "hidden_act": "silu", "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True, "attention_bias": False, "use_sliding_window": False, "sliding_window": None,
            "bos_token_id": 1, "eos_token_id": 2,
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        }  # fmt: skip
