"""Llama 4 text (Meta 2025): three layers of four use chunked attention with RoPE, the fourth full attention without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers import AttentionConfig, Builder, MLPConfig, MoEConfig, RotaryConfig, TemperatureConfig
from evener.layers.config_json import activation, read_flag, read_float, read_int, read_object, unsupported
from evener_models.config_values import expert_count, head_dim, layer_count, layer_types, read_list
from evener_models.llama import LlamaForCausalLM


class Llama4ForCausalLM(LlamaForCausalLM):
    """Scout (16 experts in every layer) and Maverick (128 in every second layer).

    Differs from Llama 3: attention stays within chunks of ``attention_chunk_size`` tokens in layers with RoPE; every
    ``no_rope_layer_interval``-th layer reads the whole context, without RoPE. With RoPE, heads of queries and keys have
    an RMS norm without weights (``use_qk_norm``); without it, queries are multiplied by a factor that grows with the
    position (``attn_temperature_tuning``). Experts have one shared expert beside them, and the sigmoid of the router's
    logit scales an expert's input, not its result.
    """

    default_theta = 500000.0
    interleaved = True

    def attention(self, config: Mapping[str, Any]) -> list[AttentionConfig]:
        dim, heads = head_dim(config), read_int(config, "num_attention_heads")
        bias = read_flag(config, "attention_bias")
        rotary = self.rotary_config(config, dim, None)
        tuned = {"floor_scale": 8192, "attn_scale": 0.1, **config}
        temperature = None
        if read_flag(config, "attn_temperature_tuning", True):
            temperature = TemperatureConfig(read_int(tuned, "floor_scale"), read_float(tuned, "attn_scale"))
        return [
            AttentionConfig(
                heads=heads,
                kv_heads=read_int(config, "num_key_value_heads", default=heads),
                head_dim=dim,
                rotary=rotary if uses_rope else RotaryConfig(0),
                chunk=chunk,
                qkv_bias=bias,
                o_bias=bias,
                qk_norm=uses_rope and read_flag(config, "use_qk_norm", True),
                qk_norms=None,
                temperature=None if uses_rope else temperature,
            )
            for uses_rope, chunk in zip(self._uses_rope(config), self._chunks(config), strict=True)
        ]

    def _uses_rope(self, config: Mapping[str, Any]) -> list[bool]:
        """For each layer whether it has RoPE. Despite its name, ``no_rope_layers`` is 1 for layers with RoPE."""
        layers = layer_count(config)
        every = read_int({"no_rope_layer_interval": 4, **config}, "no_rope_layer_interval")
        named = read_list(config, "no_rope_layers", int) or [(i + 1) % every for i in range(layers)]
        if len(named) != layers:
            raise unsupported(config, "no_rope_layers", f"it must have num_hidden_layers = {layers} entries")
        return [bool(uses_rope) for uses_rope in named]

    def _chunks(self, config: Mapping[str, Any]) -> list[int | None]:
        """The chunk size of each layer in tokens; None: full attention."""
        uses_rope = self._uses_rope(config)
        types = layer_types(config, ("chunked_attention", "full_attention"))
        types = types or ["chunked_attention" if t else "full_attention" for t in uses_rope]
        size = {"attention_chunk_size": 8192, **config}
        return [read_int(size, "attention_chunk_size") if name == "chunked_attention" else None for name in types]

    def mlp(self, config: Mapping[str, Any], layer: int) -> MLPConfig | MoEConfig:
        every = read_int({"interleave_moe_layer_step": 1, **config}, "interleave_moe_layer_step")
        chosen = read_list(config, "moe_layers", int)
        if layer not in chosen if config.get("moe_layers") is not None else (layer + 1) % every:
            inner = read_int(config, "intermediate_size_mlp")
            return MLPConfig(inner=inner, activation=activation(config), prefix="feed_forward")
        inner = read_int(config, "intermediate_size")
        return MoEConfig(
            experts=expert_count(config, "num_local_experts"),
            top=read_int(config, "num_experts_per_tok"),
            inner=inner,
            activation=activation(config),
            scoring="sigmoid",
            renormalize=False,
            router_weight_on_input=True,
            shared_inner=inner,
            router="feed_forward.router",
            prefix="feed_forward.experts",
            shared="feed_forward.shared_expert",
            transposed=True,
        )

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "vocab_size": 193, "hidden_size": 56,
            "intermediate_size": 40, "intermediate_size_mlp": 72, "num_hidden_layers": 4, "num_attention_heads": 6,
            "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_bias": False, "num_local_experts": 5,
            "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "use_qk_norm": True, "no_rope_layer_interval": 4,
            "attention_chunk_size": 13, "attn_temperature_tuning": True, "floor_scale": 6, "attn_scale": 0.4,
            "bos_token_id": 1, "eos_token_id": 2,
            "rope_parameters": {"rope_theta": 50000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
        }  # fmt: skip


class Llama4ForConditionalGeneration(Llama4ForCausalLM):
    """The text model of a multimodal checkpoint; its vision model is not read."""

    names = tuple(f"language_model.{name}" for name in Llama4ForCausalLM.names)  # type: ignore[assignment]

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        build.ignore(r"(vision_model|multi_modal_projector)\..*")
        tied = {"tie_word_embeddings": config.get("tie_word_embeddings", self.tied)}
        super().__init__({**tied, **read_object(config, "text_config")}, build)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        text = super().tiny_config()
        text.pop("architectures")
        return {
            "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": text,
            "tie_word_embeddings": False,
            "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 16, "num_hidden_layers": 1,
                              "num_attention_heads": 2, "intermediate_size": 64, "vision_output_dim": 16,
                              "image_size": 28, "patch_size": 14, "projector_input_dim": 16,
                              "projector_output_dim": 16},
        }  # fmt: skip
