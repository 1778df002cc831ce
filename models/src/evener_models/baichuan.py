"""Baichuan 1 and 2: Llama with one fused projection, at 13B with ALiBi; the second's head has rows of length 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers import Builder, RotaryConfig, alibi_slopes
from evener.layers.settings import count
from evener_models.llama import LlamaForCausalLM

#: Of Baichuan 2; its configs say ``z_loss_weight`` besides.
_VOCAB_2 = 125696
#: ``hidden_size`` of the 13B models and of the 7B models, which share the name and need not say more.
_WIDE, _NARROW = 5120, 4096


class BaichuanForCausalLM(LlamaForCausalLM):
    """13B models are told by their width, others by having ``model_max_length`` alone for the length, as the published
    13B configs do; the published 7B configs have ``max_position_embeddings``."""

    oracle = "own"
    tokenizer_class = "BaichuanTokenizer"

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        bare = config.get("max_position_embeddings") is None
        self.alibi = config.get("hidden_size") == _WIDE or (bare and config.get("hidden_size") != _NARROW)
        length = {"max_position_embeddings": count(config, "model_max_length")} if bare else {}
        super().__init__({**config, **length}, build)

    def angles(self, config: Mapping[str, Any], dim: int, window: int | None) -> RotaryConfig:
        return RotaryConfig(0) if self.alibi else super().angles(config, dim, window)

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        slopes = alibi_slopes(count(config, "num_attention_heads")) if self.alibi else None
        return {"qkv": ("W_pack",), "slopes": slopes}

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
