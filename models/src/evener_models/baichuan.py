"""Baichuan 1 and 2 (Yang et al. 2023): Llama with fused QKV; 13B models have ALiBi, Baichuan 2 a normalized head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers import Builder, RotaryConfig
from evener.layers.config_json import read_int
from evener_models.alibi import alibi_slopes
from evener_models.llama import LlamaForCausalLM

#: ``vocab_size`` of Baichuan 2, whose configs also have ``z_loss_weight``.
_VOCAB_2 = 125696
#: ``hidden_size`` of the 13B and of the 7B models, which have the same architecture name.
_WIDE, _NARROW = 5120, 4096


class BaichuanForCausalLM(LlamaForCausalLM):
    """Differs from Llama: ``W_pack`` is the fused projection of queries, keys and values. The 13B models have ALiBi in
    place of rotary embedding. In Baichuan 2 every row of the head is divided by its L2 norm (NormHead).

    No key says whether a model uses ALiBi. Models of the published widths are told apart by ``hidden_size``. Others use
    ALiBi if they have ``model_max_length`` but no ``max_position_embeddings``, like the published 13B configs.
    """

    oracle = "own"
    tokenizer_class = "BaichuanTokenizer"

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        bare = config.get("max_position_embeddings") is None
        self.alibi = config.get("hidden_size") == _WIDE or (bare and config.get("hidden_size") != _NARROW)
        length = {"max_position_embeddings": read_int(config, "model_max_length")} if bare else {}
        super().__init__({**config, **length}, build)

    def rotary_config(self, config: Mapping[str, Any], dim: int, window: int | None) -> RotaryConfig:
        return RotaryConfig(0) if self.alibi else super().rotary_config(config, dim, window)

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        slopes = alibi_slopes(read_int(config, "num_attention_heads", 1 << 16)) if self.alibi else None
        return {"qkv": ("W_pack",), "slopes": slopes}

    def normalize_head(self, config: Mapping[str, Any]) -> bool:
        return "z_loss_weight" in config or config["vocab_size"] == _VOCAB_2

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "vocab_size": 219, "hidden_size": 60,
            "intermediate_size": 92, "num_hidden_layers": 3, "num_attention_heads": 6, "hidden_act": "silu",
            "max_position_embeddings": 256, "model_max_length": 256, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False, "z_loss_weight": 0, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
