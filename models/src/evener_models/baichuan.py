"""Baichuan 1 and 2, 7B: Llama with one fused projection; the second's head has rows of length 1. Not 13B (ALiBi)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers import Builder
from evener.layers.settings import refuse
from evener_models.llama import LlamaForCausalLM

#: Of Baichuan 2; its configs say ``z_loss_weight`` besides.
_VOCAB_2 = 125696


class BaichuanForCausalLM(LlamaForCausalLM):
    """The 13B models share the name, have no rotary positions, and are refused."""

    oracle = "own"

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        if config.get("max_position_embeddings") is None:
            allowed = "13B models, whose configs have model_max_length instead, use ALiBi; the 7B models have a number"
            raise refuse(config, "max_position_embeddings", allowed)
        super().__init__(config, build)

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"qkv": ("W_pack",)}

    def unit_head(self, config: Mapping[str, Any]) -> bool:
        return "z_loss_weight" in config or config["vocab_size"] == _VOCAB_2

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "vocab_size": 219, "hidden_size": 60,
            "intermediate_size": 92, "num_hidden_layers": 3, "num_attention_heads": 6, "hidden_act": "silu",
            "max_position_embeddings": 256, "model_max_length": 256, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False, "z_loss_weight": 0, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
