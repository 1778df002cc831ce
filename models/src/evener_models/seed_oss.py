"""Seed-OSS (ByteDance 2025): Llama with biases on queries, keys and values, and an optional one on the output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers.config_json import read_flag
from evener_models.llama import LlamaForCausalLM


class SeedOssForCausalLM(LlamaForCausalLM):
    """Differs from Llama: ``attention_bias`` (default true) is for QKV only; ``attention_out_bias`` (default false)."""

    default_theta = None

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "qkv_bias": read_flag(config, "attention_bias", True),
            "o_bias": read_flag(config, "attention_out_bias"),
        }

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            **super().tiny_config(), "architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss",
            "attention_bias": True, "attention_out_bias": False, "num_key_value_heads": 1,
            "rope_parameters": {"rope_theta": 10000000.0, "rope_type": "default"},
        }  # fmt: skip
