"""MPT (MosaicML 2023): ALiBi, layer norms without biases, fused QKV, an MLP without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers import Builder, RotaryConfig
from evener.layers.config_json import read_int, read_object, unsupported
from evener_models.alibi import alibi_slopes
from evener_models.config_values import optional_float
from evener_models.llama import LlamaForCausalLM

#: Keys for which transformers implements one value only, and so does this class.
_ONLY = {"no_bias": True, "logit_scale": None}
_ONLY_ATTENTION = {"alibi": True, "alibi_bias_max": 8, "clip_qkv": None, "qk_ln": False, "prefix_lm": False,
                   "attn_type": "multihead_attention"}  # fmt: skip


class MptForCausalLM(LlamaForCausalLM):
    """Differs from Llama: the names of keys (``d_model``, ``n_heads``, ``n_layers``, ``max_seq_len``,
    ``expansion_ratio``, ``attn_config``) and tensors; ALiBi in place of rotary embedding; layer norms without bias; a
    GELU MLP without a gate; the head is tied unless the config says otherwise.
    """

    names = ("transformer.wte", "transformer.blocks", "transformer.norm_f", "lm_head")
    tied = True
    norm = "layer"
    eps_key = "layer_norm_epsilon"

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        inner = {"model_type": "mpt", **read_object(config, "attn_config")}
        for settings, fixed in ((config, _ONLY), (inner, _ONLY_ATTENTION)):
            for key, only in fixed.items():
                if settings.get(key, only) != only:
                    raise unsupported(settings, key, f"it must be {only!r}")
        shared = {
            "hidden_size": read_int(config, "d_model"), "num_attention_heads": read_int(config, "n_heads", 1 << 16),
            "num_hidden_layers": read_int(config, "n_layers"),
            "max_position_embeddings": read_int(config, "max_seq_len"),
            "intermediate_size": config["d_model"] * read_int({"expansion_ratio": 4, **config}, "expansion_ratio"),
            "hidden_act": "gelu",
        }  # fmt: skip
        super().__init__({"layer_norm_epsilon": 1e-5, **config, **shared, "attn_config": inner}, build)

    def rotary_config(self, config: Mapping[str, Any], dim: int, window: int | None) -> RotaryConfig:
        return RotaryConfig(0)

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        slopes, inner = alibi_slopes(config["num_attention_heads"]), config["attn_config"]
        scale = optional_float(inner, "softmax_scale")
        named = {"prefix": "attn", "qkv": ("Wqkv",), "o": "out_proj", "norm": "norm_1"}
        return {"slopes": slopes, "scale": scale, **named}

    def mlp_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"gated": False, "prefix": "ffn", "gate_up": ("up_proj",), "down": "down_proj", "norm": "norm_2"}

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["MptForCausalLM"], "model_type": "mpt", "vocab_size": 203, "d_model": 72, "n_heads": 6,
            "n_layers": 3, "expansion_ratio": 4, "max_seq_len": 256, "layer_norm_epsilon": 1e-5, "no_bias": True,
            "attn_config": {"alibi": True, "alibi_bias_max": 8, "softmax_scale": None}, "tie_word_embeddings": True,
            "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
