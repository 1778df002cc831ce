"""A made-up architecture with every kind of state: full, window, chunk, latent, index and recurrent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evener.contracts.descriptor import Descriptor
from evener.layers import AttentionConfig, CausalLM, LatentConfig, MLPConfig, RotaryConfig
from evener.layers.decoder import MixerConfig
from evener.layers.gated_delta import DeltaConfig
from evener.layers.latent import IndexConfig

descriptor = Descriptor(
    name="mixed",
    summary="a made-up model for tests",
    contracts={"descriptor": 1, "architecture": 2, "layers": 2},
    architectures={"MixedForCausalLM": "mixed_model:MixedForCausalLM"},
)


class MixedForCausalLM(CausalLM):
    """Two layers of some kinds, one of others, so that groups have different numbers of layers."""

    def attention(self, config: Mapping[str, Any]) -> Sequence[AttentionConfig | MixerConfig]:
        plain = AttentionConfig(heads=4, kv_heads=2, head_dim=12, rotary=RotaryConfig(12))
        window = AttentionConfig(heads=4, kv_heads=2, head_dim=12, rotary=RotaryConfig(12), window=21)
        chunk = AttentionConfig(heads=4, kv_heads=2, head_dim=12, rotary=RotaryConfig(0), chunk=19, sinks=True)
        sizes: dict[str, Any] = {"heads": 3, "nope_dim": 14, "rope_dim": 6, "value_dim": 10, "rank": 22, "q_rank": 18}
        latent = LatentConfig(**sizes, rotary=RotaryConfig(6, interleaved=True))
        index = IndexConfig(heads=5, head_dim=10, top=17)
        sparse = LatentConfig(**sizes, rotary=RotaryConfig(6, interleaved=True), index=index)
        delta = DeltaConfig(heads=4, key_heads=2, key_dim=24, value_dim=30, width=4)
        return [delta, window, plain, latent, delta, sparse, window, chunk]

    def mlp(self, config: Mapping[str, Any], layer: int = 0) -> MLPConfig:
        return MLPConfig(inner=48)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["MixedForCausalLM"], "model_type": "mixed", "vocab_size": 97, "hidden_size": 36,
            "num_hidden_layers": 8, "num_attention_heads": 4, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        }  # fmt: skip
