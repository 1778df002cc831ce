"""Gemma 1 and 2 (Gemma Team 2024). Gemma 2 has alternating windows, soft caps, norms on both sides of blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from evener.layers import AttentionConfig, MLPConfig, MoEConfig
from evener.layers.config_json import activation, read_float, read_int, require
from evener_models.config_values import alternating_layer_types, layer_windows, optional_float
from evener_models.llama import LlamaForCausalLM


class GemmaForCausalLM(LlamaForCausalLM):
    """Differs from Llama: embeddings are multiplied by sqrt(``hidden_size``); RMS norms multiply by 1 + weight; the
    activation is tanh GELU, also where early configs say ``gelu`` (as transformers reads them); the head is tied.
    """

    tied = True
    norm_offset = 1.0
    tokenizer_class = "GemmaTokenizer"

    def mlp(self, config: Mapping[str, Any], layer: int) -> MLPConfig | MoEConfig:
        return MLPConfig(inner=read_int(config, "intermediate_size"), activation="gelu_tanh")

    def embedding_scale(self, config: Mapping[str, Any]) -> float:
        return math.sqrt(read_int(config, "hidden_size"))

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "vocab_size": 217, "hidden_size": 36,
            "intermediate_size": 68, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 1,
            "head_dim": 22, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "bos_token_id": 2,
            "eos_token_id": 1, "pad_token_id": 0,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        }  # fmt: skip


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Differs from Gemma 1: ``sliding_window`` on the layers that ``layer_types`` names, by default those with an even
    index; soft caps (``attn_logit_softcapping``, ``final_logit_softcapping``); the scores' factor is
    ``query_pre_attn_scalar`` ** -0.5; norms after attention and after the MLP too.
    """

    def attention(self, config: Mapping[str, Any]) -> list[AttentionConfig]:
        for key in ("head_dim", "num_key_value_heads"):
            require(config, key)
        return super().attention(config)

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **super().attention_flags(config), "scale": read_float(config, "query_pre_attn_scalar") ** -0.5,
            "softcap": optional_float(config, "attn_logit_softcapping"), "post_norm": "post_attention_layernorm",
        }  # fmt: skip

    def windows(self, config: Mapping[str, Any]) -> list[int | None]:
        return layer_windows(
            {**config, "layer_types": config.get("layer_types") or alternating_layer_types(config)}, ""
        )

    def mlp(self, config: Mapping[str, Any], layer: int) -> MLPConfig | MoEConfig:
        return MLPConfig(
            inner=read_int(config, "intermediate_size"),
            activation=activation(config, "hidden_activation"),
            norm="pre_feedforward_layernorm",
            post_norm="post_feedforward_layernorm",
        )

    def logit_cap(self, config: Mapping[str, Any]) -> float | None:
        return optional_float(config, "final_logit_softcapping")

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            **super().tiny_config(), "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 39,
            "query_pre_attn_scalar": 20, "sliding_window": 7, "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 9.0, "num_key_value_heads": 3,
        }  # fmt: skip
