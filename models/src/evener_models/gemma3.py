"""Gemma 3 text: windows on five layers of six with angles of their own, norms on both sides of each block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from evener.errors import ArchitectureError
from evener.layers import AttentionConfig, CausalLM, MLPConfig, RotaryConfig
from evener.layers.rotary import has_entries
from evener.layers.settings import activation, count, layer_count, layer_windows, need, number, refuse


class Gemma3ForCausalLM(CausalLM):
    """``attn_logit_softcapping`` is applied where set, as in Gemma 2; transformers' Gemma 3 reads and ignores it."""

    oracle = "transformers"

    tied = True
    norm_offset = 1.0

    def attention(self, config: Mapping[str, Any]) -> list[AttentionConfig]:
        if config.get("use_bidirectional_attention"):
            raise refuse(config, "use_bidirectional_attention", "only causal Gemma 3 models are")
        dim, bias = count(config, "head_dim"), bool(config.get("attention_bias", False))
        return [
            AttentionConfig(
                heads=count(config, "num_attention_heads"),
                kv_heads=count(config, "num_key_value_heads"),
                head_dim=dim,
                rotary=self._rotary(config, dim, window is not None),
                window=window,
                scale=number(config, "query_pre_attn_scalar") ** -0.5,
                qkv_bias=bias,
                o_bias=bias,
                qk_norm=True,
                softcap=config.get("attn_logit_softcapping"),
                post_norm="post_attention_layernorm",
            )
            for window in self._windows(config)
        ]

    def _windows(self, config: Mapping[str, Any]) -> list[int | None]:
        if config.get("layer_types"):
            return layer_windows(config, "")
        every = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
        if not every:
            raise ArchitectureError(
                "config.json has neither layer_types nor sliding_window_pattern; add the model's value, e.g. 6"
            )
        window = count(config, "sliding_window")
        return [window if (i + 1) % every else None for i in range(layer_count(config))]

    def _rotary(self, config: Mapping[str, Any], dim: int, sliding: bool) -> RotaryConfig:
        layer_type = "sliding_attention" if sliding else "full_attention"
        if sliding and not has_entries(config.get("rope_parameters")):
            # In the older spellings scaling is for the full layers only.
            return RotaryConfig.from_config({"rope_theta": need(config, "rope_local_base_freq")}, dim, layer_type)
        return RotaryConfig.from_config(config, dim, layer_type)

    def mlp(self, config: Mapping[str, Any], layer: int) -> MLPConfig:
        return MLPConfig(
            inner=count(config, "intermediate_size"),
            activation=activation(config, "hidden_activation"),
            norm="pre_feedforward_layernorm",
            post_norm="post_feedforward_layernorm",
        )

    def embedding_scale(self, config: Mapping[str, Any]) -> float:
        return math.sqrt(count(config, "hidden_size"))

    def logit_cap(self, config: Mapping[str, Any]) -> float | None:
        cap = config.get("final_logit_softcapping")
        return None if cap is None else float(cap)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 223, "hidden_size": 36,
            "intermediate_size": 68, "num_hidden_layers": 4, "num_attention_heads": 3, "num_key_value_heads": 1,
            "head_dim": 22, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 256,
            "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 20, "sliding_window": 7, "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "attention_bias": False, "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1,
            "pad_token_id": 0,
            "rope_parameters": {"full_attention": {"rope_theta": 1000000.0, "rope_type": "linear", "factor": 4.0},
                                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
        }  # fmt: skip
