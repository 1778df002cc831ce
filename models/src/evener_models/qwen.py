"""Qwen 1 (Bai et al. 2023): Llama with a bias on fused QKV, dynamic NTK and log-n scaling; Qwen-VL with ``visual``.

Qwen's published code chooses the rotary base by the length of each sequence: beyond ``seq_length`` tokens it grows in
steps (``use_dynamic_ntk``), while cached keys keep their old angles. Here the base follows from the engine's limit,
``infer.max_seq_len`` (default: ``seq_length``), for all sequences, short ones too. So a key never depends on other
tokens, and a cached prefix stays valid (as in ``evener_models.rope``). The angles are those that Qwen's code gives to a
sequence as long as the limit. ``use_logn_attn`` depends on a query's position alone and needs no such choice.

The vision encoder of Qwen-VL is in ``qwen_vision``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from evener.contracts.checkpoint import ModelFiles
from evener.layers import Builder, LogNConfig
from evener.layers.config_json import read_flag, read_float, read_int, read_object
from evener_formats.tokenizers.qwen_tokenizer import FILE, QwenFiles
from evener_models.llama import LlamaForCausalLM
from evener_models.qwen_vision import QwenImages, QwenVision
from evener_models.rope import ntk_stretch


class QWenLMHeadModel(LlamaForCausalLM):
    """Differs from Llama: the names of keys (``kv_channels``, ``rotary_pct``, ``rotary_emb_base``, ``no_bias``,
    ``seq_length``) and tensors; a bias on the fused projection of queries, keys and values; ``use_dynamic_ntk``;
    ``use_logn_attn``; ``intermediate_size`` counts gate and up together.
    """

    oracle = "own"
    names = ("transformer.wte", "transformer.h", "transformer.ln_f", "lm_head")
    eps_key = "layer_norm_epsilon"

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        trained, base = read_int(config, "seq_length", least=2), read_float(config, "rotary_emb_base")
        dim, part = read_int(config, "kv_channels"), read_float(config, "rotary_pct", most=1.0)
        if read_flag(config, "use_dynamic_ntk"):
            base *= ntk_stretch(ntk_alpha(build.max_positions, trained), int(dim * part))
        shared = {
            "head_dim": dim, "rope_theta": base, "partial_rotary_factor": part, "hidden_act": "silu",
            # The config counts gate and up together.
            "intermediate_size": read_int(config, "intermediate_size") // 2,
        }  # fmt: skip
        super().__init__({"max_position_embeddings": trained, **config, **shared}, build)
        if config.get("visual") and build.first_stage:
            self.encoders = {QwenImages.encoder: QwenVision(build, read_object(config, "visual"), self.hidden_size)}

    @classmethod
    def images(cls, config: Mapping[str, Any]) -> QwenImages | None:
        return QwenImages(config["visual"]) if config.get("visual") else None

    @classmethod
    def text_files(cls, files: ModelFiles) -> ModelFiles:
        return QwenFiles(files, FILE) if files.names(FILE) else files

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        bias = not read_flag(config, "no_bias", True)
        temperature = LogNConfig(config["seq_length"]) if read_flag(config, "use_logn_attn") else None
        return {
            "prefix": "attn", "qkv": ("c_attn",), "o": "c_proj", "qkv_bias": True, "o_bias": bias, "norm": "ln_1",
            "temperature": temperature if self.limit > config["seq_length"] else None,
        }  # fmt: skip

    def mlp_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        bias = not read_flag(config, "no_bias", True)
        return {"bias": bias, "gate_up": ("w2", "w1"), "down": "c_proj", "norm": "ln_2"}

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
    """NTK scaling's alpha for a context of ``length`` tokens: 1 up to ``trained`` tokens, 3 up to twice as many, 7 up
    to four times as many, and so on."""
    return (2 << max(0, math.ceil(math.log2(max(length, 1) / trained)))) - 1
