"""Qwen 2 and 2.5 (Yang et al. 2024): Llama with biases on QKV, and an optional sliding window on the later layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers.config_json import read_flag, read_int
from evener_models.config_values import layer_count, layer_windows
from evener_models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Differs from Llama: biases on queries, keys and values; with ``use_sliding_window``, a window on the layers that
    ``layer_types`` names, by default on all from layer ``max_window_layers`` on."""

    default_theta = None

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"qkv_bias": True}

    def windows(self, config: Mapping[str, Any]) -> list[int | None]:
        layers = layer_count(config)
        if not read_flag(config, "use_sliding_window") or config.get("sliding_window") is None:
            return layer_windows({**config, "sliding_window": None}, "full_attention")
        if config.get("layer_types"):
            return layer_windows(config, "")
        full = min(read_int(config, "max_window_layers", least=0), layers)
        return [None] * full + [read_int(config, "sliding_window")] * (layers - full)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 203, "hidden_size": 42,
            "intermediate_size": 76, "num_hidden_layers": 3, "num_attention_heads": 7, "num_key_value_heads": 7,
            "hidden_act": "silu", "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
            "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "bos_token_id": 1,
            "eos_token_id": 2,
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        }  # fmt: skip
