"""Mistral (Jiang et al. 2023): Llama with an optional sliding window on every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers.config_json import read_flag, unsupported
from evener_models.llama import LlamaForCausalLM, uniform_windows


class MistralForCausalLM(LlamaForCausalLM):
    """Differs from Llama: ``sliding_window`` on every layer, or null; projections have no biases."""

    default_theta = None

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        if read_flag(config, "attention_bias"):
            raise unsupported(config, "attention_bias", "Mistral's projections have none")
        return {}

    def windows(self, config: Mapping[str, Any]) -> list[int | None]:
        if config.get("layer_types"):
            raise unsupported(config, "layer_types", "in Mistral, sliding_window holds for every layer")
        return uniform_windows(config)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 193, "hidden_size": 48,
            "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1,
            "head_dim": 14, "hidden_act": "silu", "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False, "sliding_window": 11, "bos_token_id": 1, "eos_token_id": 2,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        }  # fmt: skip
