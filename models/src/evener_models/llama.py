"""Llama 1 to 3.x (Touvron et al. 2023), and all models saved under its name (SmolLM2, Yi, …)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from evener.contracts.checkpoint import ModelFiles
from evener.layers import AttentionConfig, Builder, CausalLM, MLPConfig, MoEConfig, RotaryConfig
from evener.layers.config_json import activation, read_flag, read_int
from evener_formats.tokenizers.sentencepiece_tokenizer import published_files
from evener_models.config_values import head_dim, layer_count
from evener_models.rope import rotary


class LlamaForCausalLM(CausalLM):
    """RMS norm, grouped-query attention with rotary embedding, RMS norm, gated MLP. Beside the sizes, it reads
    ``attention_bias``, ``mlp_bias``, ``head_dim``, ``tie_word_embeddings``, and rope settings of every type that
    ``RotaryConfig`` and ``evener_models.rope`` implement. Many families are subclasses that change a few of its
    methods.

    Attributes:
        default_theta: theta if the config has no ``rope_theta``, as in configs of Llama 1 and early Llama 2
            (transformers has the same default); None: the config must have it.
        default_partial_rotary_factor: which part of a head is rotated if there is no ``partial_rotary_factor``.
        interleaved: whether pairs (2i, 2i+1) are rotated, instead of pairs (i, i + dim / 2).
        tokenizer_class: the tokenizer for ``tokenizer.model`` if the model folder names none.
    """

    oracle = "transformers"
    default_theta: float | None = 10000.0
    default_partial_rotary_factor = 1.0
    interleaved = False
    tokenizer_class = "LlamaTokenizer"

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        self.limit = build.max_positions
        super().__init__(config, build)

    def attention(self, config: Mapping[str, Any]) -> list[AttentionConfig]:
        heads, dim = read_int(config, "num_attention_heads"), head_dim(config)
        return [
            AttentionConfig(
                heads=heads,
                kv_heads=read_int(config, "num_key_value_heads", default=heads),
                head_dim=dim,
                rotary=self.rotary_config(config, dim, window),
                window=window,
                **self.attention_flags(config),
            )
            for window in self.windows(config)
        ]

    def rotary_config(self, config: Mapping[str, Any], dim: int, window: int | None) -> RotaryConfig:
        """The rotary embedding of heads of width ``dim`` in a layer with this ``window``."""
        shared = {"partial_rotary_factor": self.default_partial_rotary_factor, **config}
        return replace(rotary(shared, dim, self.limit, self.default_theta), interleaved=self.interleaved)

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Further fields of ``AttentionConfig``: biases, head norms, names."""
        bias = read_flag(config, "attention_bias")
        return {"qkv_bias": bias, "o_bias": bias}

    def windows(self, config: Mapping[str, Any]) -> list[int | None]:
        """The sliding window of each layer in tokens; None: full attention."""
        return [None] * layer_count(config)

    def mlp(self, config: Mapping[str, Any], layer: int) -> MLPConfig | MoEConfig:
        return MLPConfig(
            inner=read_int(config, "intermediate_size"), activation=activation(config), **self.mlp_flags(config)
        )

    def mlp_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Further fields of ``MLPConfig``, beside width and activation."""
        return {"bias": read_flag(config, "mlp_bias")}

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


def uniform_windows(config: Mapping[str, Any]) -> list[int | None]:
    """``sliding_window`` for every layer; it may be null."""
    window = None if config.get("sliding_window") is None else read_int(config, "sliding_window")
    return [window] * layer_count(config)
