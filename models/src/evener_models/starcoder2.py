"""StarCoder2 (Lozhkov et al. 2024): layer norms, biases everywhere, an MLP without a gate, an optional window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers.config_json import read_flag
from evener_models.llama import LlamaForCausalLM, uniform_windows


class Starcoder2ForCausalLM(LlamaForCausalLM):
    """Differs from Llama: layer norms with bias; ``use_bias`` on all projections (default true); an MLP without a gate;
    ``sliding_window`` on every layer, or null; the head is tied unless the config says otherwise."""

    tied = True
    norm = "biased_layer"
    eps_key = "norm_epsilon"

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        bias = read_flag(config, "use_bias", True)
        return {"qkv_bias": bias, "o_bias": bias}

    def windows(self, config: Mapping[str, Any]) -> list[int | None]:
        return uniform_windows(config)

    def mlp_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"gated": False, "bias": read_flag(config, "use_bias", True), "gate_up": ("c_fc",), "down": "c_proj"}

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "vocab_size": 213,
            "hidden_size": 54, "intermediate_size": 110, "num_hidden_layers": 2, "num_attention_heads": 3,
            "num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 256,
            "norm_epsilon": 1e-5, "tie_word_embeddings": True, "use_bias": True, "sliding_window": 13,
            "bos_token_id": 1, "eos_token_id": 2,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        }  # fmt: skip
