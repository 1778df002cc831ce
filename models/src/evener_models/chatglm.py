"""ChatGLM 2 and 3, and GLM-4-9B in their format: Llama with interleaved rotary pairs on half a head, fused projections.

``rope_ratio`` has two meanings: chatglm2-6b-32k divides positions by it; ChatGLM 3 and GLM-4 multiply theta by it.
Their configs have the same architecture names and keys. They are told apart by ``_name_or_path``, which the published
configs have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers import Builder
from evener.layers.config_json import read_flag, read_float, read_int, unsupported
from evener_models.llama import LlamaForCausalLM

#: ``padded_vocab_size`` of ChatGLM 2 and 3; GLM-4 has another.
_VOCAB = 65024
#: Keys for which all published models have one value, which alone is implemented.
_ONLY = {"rmsnorm": True, "post_layer_norm": True, "apply_residual_connection_post_layernorm": False,
         "add_bias_linear": False, "multi_query_attention": True, "original_rope": True}  # fmt: skip


class ChatGLMModel(LlamaForCausalLM):
    """Differs from Llama: names of keys and tensors; half of each head is rotated, in interleaved pairs;
    ``multi_query_group_num`` key and value heads; ``add_qkv_bias``; ``rope_ratio``. ChatGLM 1 has the same architecture
    name and is refused.
    """

    oracle = "own"
    names = (
        "transformer.embedding.word_embeddings", "transformer.encoder.layers", "transformer.encoder.final_layernorm",
        "transformer.output_layer",
    )  # fmt: skip
    eps_key = "layernorm_epsilon"
    default_partial_rotary_factor = 0.5
    interleaved = True
    tokenizer_class = "ChatGLMTokenizer"

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        if config.get("position_encoding_2d") or "inner_hidden_size" in config:
            why = "in ChatGLM 1, prompt tokens attend to later ones too, and this engine is causal"
            raise unsupported(config, "position_encoding_2d", f"{why}; use ChatGLM 2 or later")
        for key, only in _ONLY.items():
            if config.get(key, only) is not only:
                raise unsupported(config, key, f"the published models have {str(only).lower()}")
        shared = {
            "vocab_size": read_int(config, "padded_vocab_size"), "num_hidden_layers": read_int(config, "num_layers"),
            "num_key_value_heads": read_int(config, "multi_query_group_num"),
            "head_dim": read_int(config, "kv_channels"), **_rope(config),
            "intermediate_size": read_int(config, "ffn_hidden_size"), "hidden_act": "silu",
        }  # fmt: skip
        build.ignore(r"transformer\.rotary_pos_emb\.inv_freq")
        super().__init__({"max_position_embeddings": read_int(config, "seq_length"), **config, **shared}, build)

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        named = {"prefix": "self_attention", "qkv": ("query_key_value",), "o": "dense"}
        return {"qkv_bias": read_flag(config, "add_qkv_bias"), **named}

    def mlp_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"gate_up": ("dense_h_to_4h",), "down": "dense_4h_to_h"}

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
    """Theta and scaling from ``rope_ratio``, in the meaning of the model that the config names."""
    ratio, name = read_float(config, "rope_ratio", default=1.0), str(config.get("_name_or_path")).lower()
    if ratio != 1.0 and "chatglm2" in name:
        return {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": ratio}}
    if ratio != 1.0 and config.get("padded_vocab_size") == _VOCAB and "chatglm3" not in name:
        raise unsupported(
            config, "_name_or_path",
            f"rope_ratio = {ratio:g} has different meanings in ChatGLM 2 and in ChatGLM 3: add "
            '"_name_or_path": "THUDM/chatglm2-6b-32k" or "THUDM/chatglm3-6b-32k", whichever it was made from',
        )  # fmt: skip
    return {"rope_theta": 10000.0 * ratio}
