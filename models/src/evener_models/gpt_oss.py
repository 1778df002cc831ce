"""gpt-oss 20b and 120b (OpenAI 2025): alternating windows, attention sinks, experts with biases and clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers import MoEConfig
from evener.layers.config_json import read_flag, read_float, read_int
from evener_models.config_values import alternating_layer_types, expert_count, layer_windows
from evener_models.llama import LlamaForCausalLM


class GptOssForCausalLM(LlamaForCausalLM):
    """Differs from Llama: ``sliding_window`` on the layers that ``layer_types`` names, by default those with an even
    index; a learned logit per head that takes part in the softmax (``sinks``); biases everywhere; experts in every
    layer, weighted by a softmax over the chosen ones, with clamped SwiGLU (``swiglu_alpha``, ``swiglu_limit``) in place
    of ``hidden_act``. Experts may be stored in MXFP4.
    """

    default_theta = None

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        bias = read_flag(config, "attention_bias", True)
        return {"qkv_bias": bias, "o_bias": bias, "sinks": True}

    def windows(self, config: Mapping[str, Any]) -> list[int | None]:
        return layer_windows(
            {**config, "layer_types": config.get("layer_types") or alternating_layer_types(config)}, ""
        )

    def mlp(self, config: Mapping[str, Any], layer: int) -> MoEConfig:
        clamp = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, **config}
        return MoEConfig(
            experts=expert_count(config, "num_local_experts"),
            top=read_int(config, "num_experts_per_tok"),
            inner=read_int(config, "intermediate_size"),
            activation="clamped_swiglu",
            alpha=read_float(clamp, "swiglu_alpha"),
            limit=read_float(clamp, "swiglu_limit"),
            scoring="softmax_top",
            renormalize=False,
            bias=True,
            router="mlp.router",
            transposed=True,
        )

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 203, "hidden_size": 64,
            "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
            "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False, "attention_bias": True, "sliding_window": 9, "num_local_experts": 5,
            "num_experts_per_tok": 3, "swiglu_limit": 7.0, "eos_token_id": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"rope_theta": 150000.0, "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0,
                                "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64},
        }  # fmt: skip
