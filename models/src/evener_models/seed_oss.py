"""Seed-OSS: Llama with biases on query, key and value, and a switch for the output's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener_models.llama import LlamaForCausalLM


class SeedOssForCausalLM(LlamaForCausalLM):
    """``attention_bias``, ``attention_out_bias``, ``mlp_bias``."""

    default_theta = None

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "qkv_bias": bool(config.get("attention_bias", True)),
            "o_bias": bool(config.get("attention_out_bias", False)),
        }

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            **super().tiny_config(), "architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss",
            "attention_bias": True, "attention_out_bias": False, "num_key_value_heads": 1,
            "rope_parameters": {"rope_theta": 10000000.0, "rope_type": "default"},
        }  # fmt: skip
