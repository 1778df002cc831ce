"""Qwen 1: Llama with names of its own and a bias on the fused query, key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers import Builder, MLPConfig, MoEConfig
from evener.layers.settings import count, number, refuse
from evener_models.llama import LlamaForCausalLM


class QWenLMHeadModel(LlamaForCausalLM):
    """``kv_channels``, ``rotary_pct``, ``rotary_emb_base``, ``no_bias``. Up to ``seq_length`` tokens: beyond, the model
    changes its angles (``use_dynamic_ntk``) and scales queries (``use_logn_attn``), which is not implemented."""

    oracle = "own"
    names = ("transformer.wte", "transformer.h", "transformer.ln_f", "lm_head")
    eps_key = "layer_norm_epsilon"

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        longest = count(config, "seq_length")
        for key in ("use_dynamic_ntk", "use_logn_attn"):
            if config.get(key) and build.max_positions > longest:
                raise refuse(config, key, f"it begins beyond seq_length tokens: set infer.max_seq_len={longest}")
        shared = {
            "head_dim": count(config, "kv_channels"), "rope_theta": number(config, "rotary_emb_base"),
            "partial_rotary_factor": number(config, "rotary_pct"),
        }  # fmt: skip
        super().__init__({"max_position_embeddings": longest, **config, **shared}, build)

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        bias = not config.get("no_bias", True)
        return {"at": "attn", "qkv": ("c_attn",), "o": "c_proj", "qkv_bias": True, "o_bias": bias, "norm": "ln_1"}

    def mlp(self, config: Mapping[str, Any], layer: int) -> MLPConfig | MoEConfig:
        # Its intermediate_size counts both halves of the gated product.
        return MLPConfig(
            inner=count(config, "intermediate_size") // 2, bias=not config.get("no_bias", True), rise=("w2", "w1"),
            fall="c_proj", norm="ln_2",
        )  # fmt: skip

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["QWenLMHeadModel"], "model_type": "qwen", "vocab_size": 221, "hidden_size": 50,
            "intermediate_size": 152, "num_hidden_layers": 3, "num_attention_heads": 5, "kv_channels": 10,
            "layer_norm_epsilon": 1e-6, "no_bias": True, "rotary_pct": 1.0, "rotary_emb_base": 10000,
            "seq_length": 256, "max_position_embeddings": 256, "use_dynamic_ntk": True, "use_logn_attn": True,
            "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
