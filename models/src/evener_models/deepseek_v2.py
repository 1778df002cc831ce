"""DeepSeek V2 and V2-Lite (DeepSeek-AI 2024): latent attention (MLA), and experts in all but the first layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from evener.errors import ArchitectureError
from evener.layers import CausalLM, LatentConfig, MLPConfig, MoEConfig, RotaryConfig
from evener.layers.config_json import activation, read_flag, read_float, read_int, read_object, unsupported
from evener.layers.latent import IndexConfig
from evener.layers.rotary import scaling_kind, yarn_factor
from evener_models.config_values import expert_count, layer_count


class DeepseekV2ForCausalLM(CausalLM):
    """Differs from Llama: multi-head latent attention (``kv_lora_rank``, ``q_lora_rank``, which is null in V2-Lite),
    and from layer ``first_k_dense_replace`` on, ``n_routed_experts`` experts with ``n_shared_experts`` shared ones.
    """

    oracle = "transformers"

    def attention(self, config: Mapping[str, Any]) -> Sequence[LatentConfig]:
        heads = read_int(config, "num_attention_heads")
        if read_int(config, "num_key_value_heads", default=heads) != heads:
            raise unsupported(config, "num_key_value_heads", "in latent attention it must equal num_attention_heads")
        nope, rope = read_int(config, "qk_nope_head_dim"), read_int(config, "qk_rope_head_dim")
        rotary = RotaryConfig.from_config({**config, "partial_rotary_factor": None}, rope, default_base=10000.0)
        if rotary.dim != rope:
            raise ArchitectureError("config.json has a partial_rotary_factor, but latent attention rotates all of "
                                    f"qk_rope_head_dim = {rope}; remove it")  # fmt: skip
        layer = LatentConfig(
            heads=heads,
            nope_dim=nope,
            rope_dim=rope,
            value_dim=read_int(config, "v_head_dim"),
            rank=read_int(config, "kv_lora_rank"),
            q_rank=None if config.get("q_lora_rank") is None else read_int(config, "q_lora_rank"),
            rotary=replace(rotary, interleaved=read_flag(config, "rope_interleave", True)),
            scale=(nope + rope) ** -0.5 * _yarn_mscale(config) ** 2,
            bias=read_flag(config, "attention_bias"),
            index=self.indexer(config),
        )
        return [layer] * layer_count(config)

    def indexer(self, config: Mapping[str, Any]) -> IndexConfig | None:
        """The indexer of sparse attention, for every layer. Default: none."""
        del config
        return None

    def mlp(self, config: Mapping[str, Any], layer: int) -> MLPConfig | MoEConfig:
        dense = layer < read_int({"first_k_dense_replace": 0, **config}, "first_k_dense_replace", least=0)
        every = read_int({"moe_layer_freq": 1, **config}, "moe_layer_freq")
        if dense or not read_int(config, "n_routed_experts", least=0, default=0) or layer % every:
            return MLPConfig(inner=read_int(config, "intermediate_size"), activation=activation(config))
        inner = read_int(config, "moe_intermediate_size")
        return MoEConfig(
            experts=expert_count(config, "n_routed_experts"),
            top=read_int(config, "num_experts_per_tok"),
            inner=inner,
            activation=activation(config),
            scale=read_float(config, "routed_scaling_factor"),
            shared_inner=inner * read_int(config, "n_shared_experts", 1 << 12, least=0, default=0),
            **self.routing(config),
        )

    def routing(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of ``MoEConfig`` that say how experts are chosen, apart from their number."""
        renormalized = read_flag(config, "norm_topk_prob")
        if renormalized or config.get("scoring_func", "softmax") != "softmax":
            key = "norm_topk_prob" if renormalized else "scoring_func"
            raise unsupported(config, key, "DeepSeek V2 weights experts by softmax scores, not renormalized")
        if config.get("topk_method", "greedy") == "greedy":
            return {"renormalize": False}
        if config["topk_method"] != "group_limited_greedy":
            raise unsupported(config, "topk_method", "implemented are: greedy, group_limited_greedy")
        return {
            "renormalize": False,
            "groups": read_int(config, "n_group"),
            "top_groups": read_int(config, "topk_group"),
        }

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 197,
            "hidden_size": 45, "intermediate_size": 76, "num_hidden_layers": 3, "num_attention_heads": 3,
            "num_key_value_heads": 3, "hidden_act": "silu", "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False, "attention_bias": False, "kv_lora_rank": 20, "q_lora_rank": 28,
            "qk_nope_head_dim": 14, "qk_rope_head_dim": 6, "v_head_dim": 10, "bos_token_id": 1, "eos_token_id": 2,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "first_k_dense_replace": 1,
            "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 22, "n_shared_experts": 2,
            "routed_scaling_factor": 1.7, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
            "norm_topk_prob": False, "moe_layer_freq": 1,
        }  # fmt: skip


def _yarn_mscale(config: Mapping[str, Any]) -> float:
    """YaRN's factor on queries and on keys (``mscale_all_dim``); 1 without YaRN."""
    settings = read_object(config, "rope_parameters") or read_object(config, "rope_scaling")
    if scaling_kind(settings) == "default" or not settings.get("mscale_all_dim"):
        return 1.0
    return yarn_factor(read_float(settings, "factor"), read_float(settings, "mscale_all_dim"))
