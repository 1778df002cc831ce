"""Qwen 1: Llama with names of its own, a bias on the fused query, key and value, and ways to go beyond ``seq_length``;
with ``visual`` in its config Qwen-VL, whose eyes are in ``qwen_vision``.

Qwen's own code looks at each sequence as it stands: beyond ``seq_length`` tokens the base of its angles grows in steps
(``use_dynamic_ntk``), while cached keys keep the angles that they had. Here the base follows from the engine's limit,
``infer.max_seq_len``, so that a key is the same in any company and a cached prefix stays right (as in ``rope``): every
sequence has the angles that Qwen's code gives to one as long as the limit, which is ``seq_length`` unless it is set.
``use_logn_attn`` is a factor on each query by its position alone, and needs no such choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from evener.contracts.checkpoint import ModelFiles
from evener.layers import Builder, LogNConfig
from evener.layers.settings import count, number
from evener_models.llama import LlamaForCausalLM
from evener_models.qwen_tokenizer import FILE, QwenFiles
from evener_models.qwen_vision import QwenImages, QwenVision


class QWenLMHeadModel(LlamaForCausalLM):
    """``kv_channels``, ``rotary_pct``, ``rotary_emb_base``, ``no_bias``, ``seq_length``, ``use_dynamic_ntk``,
    ``use_logn_attn``."""

    oracle = "own"
    names = ("transformer.wte", "transformer.h", "transformer.ln_f", "lm_head")
    eps_key = "layer_norm_epsilon"

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        trained, base = count(config, "seq_length", least=2), number(config, "rotary_emb_base")
        dim, part = count(config, "kv_channels"), number(config, "rotary_pct")
        if config.get("use_dynamic_ntk"):
            turned = int(dim * part)
            base *= ntk_alpha(build.max_positions, trained) ** (turned / (turned - 2))
        shared = {
            "head_dim": dim, "rope_theta": base, "partial_rotary_factor": part, "hidden_act": "silu",
            # It counts both halves of the gated product.
            "intermediate_size": count(config, "intermediate_size") // 2,
        }  # fmt: skip
        super().__init__({"max_position_embeddings": trained, **config, **shared}, build)
        if config.get("visual") and build.first_stage:
            self.encoders = {QwenImages.encoder: QwenVision(build, config["visual"], self.hidden_size)}

    @classmethod
    def images(cls, config: Mapping[str, Any]) -> QwenImages | None:
        return QwenImages(config["visual"]) if config.get("visual") else None

    @classmethod
    def text_files(cls, files: ModelFiles) -> ModelFiles:
        return QwenFiles(files, FILE) if files.names(FILE) else files

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        bias = not config.get("no_bias", True)
        temperature = LogNConfig(config["seq_length"]) if config.get("use_logn_attn") else None
        return {
            "at": "attn", "qkv": ("c_attn",), "o": "c_proj", "qkv_bias": True, "o_bias": bias, "norm": "ln_1",
            "temperature": temperature if self.limit > config["seq_length"] else None,
        }  # fmt: skip

    def mlp_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        bias = not config.get("no_bias", True)
        return {"bias": bias, "rise": ("w2", "w1"), "fall": "c_proj", "norm": "ln_2"}

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["QWenLMHeadModel"], "model_type": "qwen", "vocab_size": 221, "hidden_size": 50,
            "intermediate_size": 152, "num_hidden_layers": 3, "num_attention_heads": 5, "kv_channels": 10,
            "layer_norm_epsilon": 1e-6, "no_bias": True, "rotary_pct": 1.0, "rotary_emb_base": 10000,
            "seq_length": 256, "max_position_embeddings": 256, "use_dynamic_ntk": True, "use_logn_attn": True,
            "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip


def ntk_alpha(length: int, trained: int) -> int:
    """The factor that NTK scaling raises the base by, for a context of ``length`` tokens: 1 up to ``trained``, 3 up to
    twice as many, 7 up to four times, and so on."""
    return (2 << max(0, math.ceil(math.log2(length / trained)))) - 1
