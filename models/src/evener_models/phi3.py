"""Phi 3, 3.5 and 4, text (Abdin et al. 2024): Llama with fused projections, an optional window and LongRoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers import Builder
from evener.layers.config_json import read_object
from evener_models.llama import LlamaForCausalLM, uniform_windows


class Phi3ForCausalLM(LlamaForCausalLM):
    """Differs from Llama: one tensor for queries, keys and values, one for gate and up; ``sliding_window`` on every
    layer; ``partial_rotary_factor``; LongRoPE, which early configs call ``su`` or ``yarn``."""

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        scaling = read_object(config, "rope_scaling")
        if scaling.get("type") == "yarn":
            config = {**config, "rope_scaling": {**scaling, "type": "longrope"}}
        super().__init__(config, build)

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"qkv": ("qkv_proj",)}

    def windows(self, config: Mapping[str, Any]) -> list[int | None]:
        return uniform_windows(config)

    def mlp_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"gate_up": ("gate_up_proj",)}

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": 207, "hidden_size": 60,
            "intermediate_size": 90, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 1,
            "hidden_act": "silu", "max_position_embeddings": 256, "original_max_position_embeddings": 16,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "sliding_window": None, "bos_token_id": 1,
            "eos_token_id": 2, "pad_token_id": 0,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "longrope", "partial_rotary_factor": 1.0,
                                "original_max_position_embeddings": 16, "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4],
                                "long_factor": [1.5, 2.0, 3.0, 5.0, 8.0]},
        }  # fmt: skip
