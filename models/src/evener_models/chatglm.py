"""ChatGLM 2 and 3, and GLM-4-9B in their format: pairs of half a head rotated, grouped heads, everything fused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from evener.layers import AttentionConfig, Builder, MLPConfig, MoEConfig
from evener.layers.settings import count, refuse
from evener_models.llama import LlamaForCausalLM

#: What the family's code can do otherwise, and its published models do not.
_ONLY = {"rmsnorm": True, "post_layer_norm": True, "apply_residual_connection_post_layernorm": False,
         "add_bias_linear": False, "multi_query_attention": True, "original_rope": True}  # fmt: skip


class ChatGLMModel(LlamaForCausalLM):
    """``multi_query_group_num``, ``add_qkv_bias``, ``rope_ratio`` (a factor on theta)."""

    oracle = "own"
    names = (
        "transformer.embedding.word_embeddings", "transformer.encoder.layers", "transformer.encoder.final_layernorm",
        "transformer.output_layer",
    )  # fmt: skip
    eps_key = "layernorm_epsilon"

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        for key, only in _ONLY.items():
            if config.get(key, only) is not only:
                raise refuse(config, key, f"the published models have {str(only).lower()}")
        shared = {
            "vocab_size": count(config, "padded_vocab_size"), "num_hidden_layers": count(config, "num_layers"),
            "num_key_value_heads": count(config, "multi_query_group_num"), "head_dim": count(config, "kv_channels"),
            "rope_theta": 10000.0 * float(config.get("rope_ratio") or 1.0), "partial_rotary_factor": 0.5,
            "intermediate_size": count(config, "ffn_hidden_size"), "hidden_act": "silu",
        }  # fmt: skip
        build.ignore(r"transformer\.rotary_pos_emb\.inv_freq")
        super().__init__({"max_position_embeddings": count(config, "seq_length"), **config, **shared}, build)

    def attention(self, config: Mapping[str, Any]) -> list[AttentionConfig]:
        return [replace(a, rotary=replace(a.rotary, interleaved=True)) for a in super().attention(config)]

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        named = {"at": "self_attention", "qkv": ("query_key_value",), "o": "dense"}
        return {"qkv_bias": bool(config.get("add_qkv_bias")), **named}

    def mlp(self, config: Mapping[str, Any], layer: int) -> MLPConfig | MoEConfig:
        return MLPConfig(inner=count(config, "ffn_hidden_size"), rise=("dense_h_to_4h",), fall="dense_4h_to_h")

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["ChatGLMModel"], "model_type": "chatglm", "vocab_size": 223, "padded_vocab_size": 223,
            "hidden_size": 50, "ffn_hidden_size": 70, "num_layers": 3, "num_attention_heads": 5, "kv_channels": 20,
            "multi_query_attention": True, "multi_query_group_num": 1, "layernorm_epsilon": 1e-5, "rmsnorm": True,
            "add_bias_linear": False, "add_qkv_bias": True, "post_layer_norm": True, "original_rope": True,
            "apply_residual_connection_post_layernorm": False, "seq_length": 256, "max_position_embeddings": 256,
            "tie_word_embeddings": False, "eos_token_id": 2,
        }  # fmt: skip
