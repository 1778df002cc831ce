"""Qwen3-Next text (Qwen Team 2025): three layers of four are gated delta nets, the fourth is gated attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evener.layers import Builder, MLPConfig, MoEConfig, RotaryConfig
from evener.layers.config_json import activation, read_flag, read_int, unsupported
from evener.layers.gated_delta import DeltaConfig, GatedAttentionConfig
from evener_models.config_values import layer_count, layer_types
from evener_models.prediction import Predicting, PredictionLayer, PredictionNames
from evener_models.qwen_moe import experts

_KINDS = ("linear_attention", "full_attention")
_LAYERS = "num_nextn_predict_layers"
_PREDICTION = PredictionNames(
    "mtp", "mtp.layers.0", "pre_fc_norm_embedding", "pre_fc_norm_hidden", join="fc", norm="norm"
)


class Qwen3NextForCausalLM(Predicting):
    """Differs from Qwen 3 with experts: a gated delta net (Yang et al. 2024) in place of attention, except in the
    layers that ``layer_types`` names, by default every ``full_attention_interval``-th; there, the result of attention
    is multiplied by the sigmoid of a gate. A quarter of each head is rotated; RMS norms multiply by 1 + weight; there
    is a shared expert with a gate. The layer for multi-token prediction has attention, and is read if drafts want it;
    ``num_nextn_predict_layers``, which the published config lacks, may say that there is none.
    """

    oracle = "transformers"

    norm_offset = 1.0

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        super().__init__(config, build)
        self.predicts = build.predicts and read_int({_LAYERS: 1, **config}, _LAYERS, 1 << 10, least=0) > 0
        if self.predicts:
            self.prediction = PredictionLayer(self, config, build, _PREDICTION, number=0)
        build.ignore(r"mtp\.layers\.[1-9].*" if self.predicts else r"mtp\..*")

    def mixer_of_prediction(self, config: Mapping[str, Any]) -> GatedAttentionConfig:
        return self._gated_attention(config)

    def _gated_attention(self, config: Mapping[str, Any]) -> GatedAttentionConfig:
        dim = read_int(config, "head_dim")
        return GatedAttentionConfig(
            heads=read_int(config, "num_attention_heads"),
            kv_heads=read_int(config, "num_key_value_heads"),
            head_dim=dim,
            rotary=RotaryConfig.from_config({"partial_rotary_factor": 0.25, **config}, dim),
            bias=read_flag(config, "attention_bias"),
        )

    def attention(self, config: Mapping[str, Any]) -> Sequence[DeltaConfig | GatedAttentionConfig]:
        attention = self._gated_attention(config)
        delta = DeltaConfig(
            heads=read_int(config, "linear_num_value_heads"),
            key_heads=read_int(config, "linear_num_key_heads"),
            key_dim=read_int(config, "linear_key_head_dim"),
            value_dim=read_int(config, "linear_value_head_dim"),
            width=read_int(config, "linear_conv_kernel_dim", least=2),
        )
        if delta.heads % delta.key_heads:
            raise unsupported(config, "linear_num_value_heads", "it must be a multiple of linear_num_key_heads")
        return [delta if kind == "linear_attention" else attention for kind in self._kinds(config)]

    def _kinds(self, config: Mapping[str, Any]) -> Sequence[str]:
        layers = layer_count(config)
        every = read_int({"full_attention_interval": 4, **config}, "full_attention_interval")
        return layer_types(config, _KINDS) or [_KINDS[(i + 1) % every == 0] for i in range(layers)]

    def mlp(self, config: Mapping[str, Any], layer: int) -> MLPConfig | MoEConfig:
        plain = MLPConfig(inner=read_int(config, "intermediate_size"), activation=activation(config))
        if not config.get("num_experts"):
            return plain
        shared = read_int(config, "shared_expert_intermediate_size")
        extra = {"shared_inner": shared, "shared": "mlp.shared_expert", "shared_gate": "mlp.shared_expert_gate"}
        return experts({"norm_topk_prob": True, **config}, layer, **extra) or plain

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 191, "hidden_size": 42,
            "intermediate_size": 66, "num_hidden_layers": 4, "num_attention_heads": 3, "num_key_value_heads": 1,
            "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False, "attention_bias": False, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 10, "linear_value_head_dim": 14, "linear_num_key_heads": 2,
            "linear_num_value_heads": 6, "mlp_only_layers": [2], "num_experts": 7,
            "num_experts_per_tok": 3, "moe_intermediate_size": 18, "shared_expert_intermediate_size": 30,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "bos_token_id": 1, "eos_token_id": 2,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25},
        }  # fmt: skip
