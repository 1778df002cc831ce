"""Llama 1 to 3.x, and everything saved under its name (SmolLM2, Yi, …)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from evener.contracts.checkpoint import ModelFiles
from evener.layers import AttentionConfig, Builder, CausalLM, MLPConfig, MoEConfig, RotaryConfig
from evener.layers.settings import activation, count, head_dim, layer_count
from evener_models.rope import rotary
from evener_models.sentencepiece_tokenizer import published_files


class LlamaForCausalLM(CausalLM):
    """``attention_bias``, ``mlp_bias``, ``head_dim``, tied or untied heads, every rope type that ``RotaryConfig`` and
    ``rope`` have.

    Attributes:
        default_theta: what configs from before ``rope_theta`` existed (Llama 1, early Llama 2) mean; transformers reads
            them so, too. None: they must say it.
        default_turned: which part of a head is rotated where ``partial_rotary_factor`` does not say.
        interleaved: pairs (2i, 2i+1) are rotated instead of halves.
        tokenizer_class: which reads ``tokenizer.model`` of folders that name none.
    """

    oracle = "transformers"
    default_theta: float | None = 10000.0
    default_turned = 1.0
    interleaved = False
    tokenizer_class = "LlamaTokenizer"

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        self.limit = build.max_positions
        super().__init__(config, build)

    def attention(self, config: Mapping[str, Any]) -> list[AttentionConfig]:
        heads, dim = count(config, "num_attention_heads"), head_dim(config)
        return [
            AttentionConfig(
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=dim,
                rotary=self.angles(config, dim, window),
                window=window,
                **self.attention_flags(config),
            )
            for window in self.windows(config)
        ]

    def angles(self, config: Mapping[str, Any], dim: int, window: int | None) -> RotaryConfig:
        """How heads of ``dim`` are rotated in a layer with this window."""
        shared = {"partial_rotary_factor": self.default_turned, **config}
        return replace(rotary(shared, dim, self.limit, self.default_theta), interleaved=self.interleaved)

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Which biases and head norms there are, and what else an ``AttentionConfig`` can say."""
        bias = bool(config.get("attention_bias", False))
        return {"qkv_bias": bias, "o_bias": bias}

    def windows(self, config: Mapping[str, Any]) -> list[int | None]:
        """The sliding window of each layer."""
        return [None] * layer_count(config)

    def mlp(self, config: Mapping[str, Any], layer: int) -> MLPConfig | MoEConfig:
        return MLPConfig(
            inner=count(config, "intermediate_size"), activation=activation(config), **self.mlp_flags(config)
        )

    def mlp_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What an ``MLPConfig`` can say beside width and activation."""
        return {"bias": bool(config.get("mlp_bias", False))}

    @classmethod
    def text_files(cls, files: ModelFiles) -> ModelFiles:
        return published_files(files, cls.tokenizer_class)

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


def same_window(config: Mapping[str, Any]) -> list[int | None]:
    """``sliding_window`` in each layer; it may be null."""
    window = None if config.get("sliding_window") is None else count(config, "sliding_window")
    return [window] * layer_count(config)


def alternating(config: Mapping[str, Any]) -> list[str]:
    """What ``layer_types`` would say of a model with windows on layers 0, 2, 4 and so on."""
    return [("sliding_attention", "full_attention")[i % 2] for i in range(layer_count(config))]
