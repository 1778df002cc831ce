"""DeepSeek V3 (DeepSeek-AI 2024), R1, V3.1, Kimi K2: V2 with another routing. V3.2-Exp: with sparse attention (DSA)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers.config_json import read_flag, read_int, unsupported
from evener.layers.latent import IndexConfig
from evener_models.deepseek_v2 import DeepseekV2ForCausalLM
from evener_models.prediction import NumberedPrediction


class DeepseekV3ForCausalLM(NumberedPrediction, DeepseekV2ForCausalLM):
    """Differs from DeepSeek V2: experts are weighted by sigmoid scores, and chosen by these plus a bias, within the
    groups whose best two scores add up to most (``topk_method`` "noaux_tc").
    """

    def routing(self, config: Mapping[str, Any]) -> dict[str, Any]:
        for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
            if config.get(key, only) != only:
                raise unsupported(config, key, f"in DeepSeek V3 it is {only}")
        return {
            "scoring": "sigmoid",
            "correction": "mlp.gate.e_score_correction_bias",
            "renormalize": read_flag(config, "norm_topk_prob", True),
            "groups": read_int(config, "n_group"),
            "top_groups": read_int(config, "topk_group"),
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
    """Differs from DeepSeek V3: an indexer chooses ``index_topk`` earlier tokens, which attention reads (DSA)."""

    def indexer(self, config: Mapping[str, Any]) -> IndexConfig:
        return IndexConfig(
            heads=read_int(config, "index_n_heads"),
            head_dim=read_int(config, "index_head_dim"),
            top=read_int(config, "index_topk"),
        )

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            **super().tiny_config(), "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
            "index_n_heads": 9, "index_head_dim": 14, "index_topk": 12,
        }  # fmt: skip
