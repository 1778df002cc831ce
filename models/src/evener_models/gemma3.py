"""Gemma 3 text (Gemma Team 2025): Gemma 2 with head norms, and a rotary base of their own for sliding window layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.errors import ArchitectureError
from evener.layers import AttentionConfig, RotaryConfig
from evener.layers.config_json import read_flag, read_int, read_object, require, unsupported
from evener.layers.rotary import has_entries
from evener_models.config_values import first_present, layer_count, layer_windows
from evener_models.gemma import Gemma2ForCausalLM


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Differs from Gemma 2: norms of query and key heads; ``sliding_window`` on the layers that ``layer_types`` or
    ``sliding_window_pattern`` names (in the published models five of six); these layers have a rotary base of their own
    (``rope_local_base_freq``). ``attn_logit_softcapping`` is applied if it is set; transformers ignores it.
    """

    def attention(self, config: Mapping[str, Any]) -> list[AttentionConfig]:
        if read_flag(config, "use_bidirectional_attention"):
            raise unsupported(config, "use_bidirectional_attention", "only causal attention is")
        return super().attention(config)

    def attention_flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().attention_flags(config), "qk_norm": True}

    def windows(self, config: Mapping[str, Any]) -> list[int | None]:
        if config.get("layer_types"):
            return layer_windows(config, "")
        key = first_present(config, "sliding_window_pattern", "_sliding_window_pattern")
        if config.get(key) is None:
            raise ArchitectureError(
                "config.json has neither layer_types nor sliding_window_pattern; add the model's value, e.g. 6"
            )
        every, window = read_int(config, key), read_int(config, "sliding_window")
        return [window if (i + 1) % every else None for i in range(layer_count(config))]

    def rotary_config(self, config: Mapping[str, Any], dim: int, window: int | None) -> RotaryConfig:
        layer_type = "full_attention" if window is None else "sliding_attention"
        if window is not None and not has_entries(read_object(config, "rope_parameters")):
            # Before rope_parameters had one entry per layer type, scaling was for full attention layers only.
            return RotaryConfig.from_config({"rope_theta": require(config, "rope_local_base_freq")}, dim, layer_type)
        return RotaryConfig.from_config(config, dim, layer_type)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 223, "hidden_size": 36,
            "intermediate_size": 68, "num_hidden_layers": 4, "num_attention_heads": 3, "num_key_value_heads": 1,
            "head_dim": 22, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 256,
            "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 20, "sliding_window": 7, "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "attention_bias": False, "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1,
            "pad_token_id": 0,
            "rope_parameters": {"full_attention": {"rope_theta": 1000000.0, "rope_type": "linear", "factor": 4.0},
                                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
        }  # fmt: skip
