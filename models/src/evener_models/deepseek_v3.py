"""DeepSeek V3, R1 and V3.1, and Kimi K2: V2 with another routing; V3.2-Exp: with a sparse indexer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers import Builder
from evener.layers.latent import IndexConfig
from evener.layers.settings import count, layer_count, refuse
from evener_models.deepseek_v2 import DeepseekV2ForCausalLM


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """Checkpoints hold the layers of multi-token prediction after the model's own; they are passed over."""

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        super().__init__(config, build)
        layers = layer_count(config)
        for extra in range(int(config.get("num_nextn_predict_layers") or 0)):
            build.ignore(rf"model\.layers\.{layers + extra}\..*")

    def routing(self, config: Mapping[str, Any]) -> dict[str, Any]:
        for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
            if config.get(key, only) != only:
                raise refuse(config, key, f"this family's is {only}")
        return {
            "scoring": "sigmoid",
            "correction": "mlp.gate.e_score_correction_bias",
            "renormalize": bool(config.get("norm_topk_prob", True)),
            "groups": count(config, "n_group"),
            "top_groups": count(config, "topk_group"),
            "group_best": 2,
        }

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            **super().tiny_config(), "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
            "rope_interleave": True, "num_nextn_predict_layers": 0,
            "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "n_routed_experts": 12,
        }  # fmt: skip


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """V3.2-Exp: each query reads ``index_topk`` earlier tokens."""

    def indexer(self, config: Mapping[str, Any]) -> IndexConfig:
        return IndexConfig(
            heads=count(config, "index_n_heads"),
            head_dim=count(config, "index_head_dim"),
            top=count(config, "index_topk"),
        )

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            **super().tiny_config(), "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
            "index_n_heads": 9, "index_head_dim": 14, "index_topk": 12,
        }  # fmt: skip
