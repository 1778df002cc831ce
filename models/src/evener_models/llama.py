"""Llama 1 to 3.x, and everything saved under its name (SmolLM2, Yi, …)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers import AttentionConfig, Builder, CausalLM, MLPConfig, MoEConfig
from evener.layers.settings import activation, count, head_dim, layer_count
from evener_models.rope import rotary


class LlamaForCausalLM(CausalLM):
    """``attention_bias``, ``mlp_bias``, ``head_dim``, tied or untied heads, every rope type that ``RotaryConfig`` and
    ``rope`` have."""

    oracle = "transformers"

    #: What configs from before ``rope_theta`` existed (Llama 1, early Llama 2) mean; transformers reads them so, too.
    default_theta: float | None = 10000.0

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        self.limit = build.max_positions
        super().__init__(config, build)

    def attention(self, config: Mapping[str, Any]) -> list[AttentionConfig]:
        heads, dim = count(config, "num_attention_heads"), head_dim(config)
        angles = rotary(config, dim, self.limit, self.default_theta)
        return [
            AttentionConfig(
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=dim,
                rotary=angles,
                window=window,
                **self.attention_flags(config),
            )
            for window in self.windows(config)
        ]

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Which biases and head norms there are."""
        bias = bool(config.get("attention_bias", False))
        return {"qkv_bias": bias, "o_bias": bias}

    def windows(self, config: Mapping[str, Any]) -> list[int | None]:
        """The sliding window of each layer."""
        return [None] * layer_count(config)

    def mlp(self, config: Mapping[str, Any], layer: int) -> MLPConfig | MoEConfig:
        return MLPConfig(
            inner=count(config, "intermediate_size"),
            activation=activation(config),
            bias=bool(config.get("mlp_bias", False)),
        )

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 211, "hidden_size": 60,
            "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
            "head_dim": 10, "hidden_act": "silu", "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "bos_token_id": 1,
            "eos_token_id": 2,
            "rope_parameters": {"rope_theta": 50000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
        }  # fmt: skip
