"""ChatGLM 2 and 3, and GLM-4-9B in their format: pairs of half a head rotated, grouped heads, everything fused.

``rope_ratio`` means two things: chatglm2-6b-32k divides positions by it, ChatGLM 3 and GLM-4 multiply theta by it.
Their configs have equal names and keys, so ``_name_or_path``, which the published ones have, tells them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers import Builder
from evener.layers.settings import count, refuse
from evener_models.llama import LlamaForCausalLM

#: Of ChatGLM 2 and 3 alike; GLM-4 has another.
_VOCAB = 65024
#: What the family's code can do otherwise, and its published models do not.
_ONLY = {"rmsnorm": True, "post_layer_norm": True, "apply_residual_connection_post_layernorm": False,
         "add_bias_linear": False, "multi_query_attention": True, "original_rope": True}  # fmt: skip


class ChatGLMModel(LlamaForCausalLM):
    """``multi_query_group_num``, ``add_qkv_bias``, ``rope_ratio``. ChatGLM 1 shares the name and is refused."""

    oracle = "own"
    names = (
        "transformer.embedding.word_embeddings", "transformer.encoder.layers", "transformer.encoder.final_layernorm",
        "transformer.output_layer",
    )  # fmt: skip
    eps_key = "layernorm_epsilon"
    default_turned = 0.5
    interleaved = True
    tokenizer_class = "ChatGLMTokenizer"

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        if config.get("position_encoding_2d") or "inner_hidden_size" in config:
            why = "each token of ChatGLM 1's prompt sees the whole prompt, which a causal engine does not compute"
            raise refuse(config, "position_encoding_2d", f"{why}; ChatGLM 2 and later are causal")
        for key, only in _ONLY.items():
            if config.get(key, only) is not only:
                raise refuse(config, key, f"the published models have {str(only).lower()}")
        shared = {
            "vocab_size": count(config, "padded_vocab_size"), "num_hidden_layers": count(config, "num_layers"),
            "num_key_value_heads": count(config, "multi_query_group_num"), "head_dim": count(config, "kv_channels"),
            **_rope(config),
            "intermediate_size": count(config, "ffn_hidden_size"), "hidden_act": "silu",
        }  # fmt: skip
        build.ignore(r"transformer\.rotary_pos_emb\.inv_freq")
        super().__init__({"max_position_embeddings": count(config, "seq_length"), **config, **shared}, build)

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        named = {"at": "self_attention", "qkv": ("query_key_value",), "o": "dense"}
        return {"qkv_bias": bool(config.get("add_qkv_bias")), **named}

    def mlp_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"rise": ("dense_h_to_4h",), "fall": "dense_4h_to_h"}

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


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Theta and scaling, by the model that the config names."""
    ratio, name = float(config.get("rope_ratio") or 1.0), str(config.get("_name_or_path")).lower()
    if ratio != 1.0 and "chatglm2" in name:
        return {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": ratio}}
    if ratio != 1.0 and config.get("padded_vocab_size") == _VOCAB and "chatglm3" not in name:
        raise refuse(
            config, "_name_or_path",
            f"rope_ratio = {ratio:g} means one thing in ChatGLM 2 and another in ChatGLM 3: add "
            '"_name_or_path": "THUDM/chatglm2-6b-32k" or "THUDM/chatglm3-6b-32k", whichever it was made from',
        )  # fmt: skip
    return {"rope_theta": 10000.0 * ratio}
