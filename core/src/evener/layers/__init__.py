"""Shared layers: what a model family is made of. Public, with a contract version of its own (``layers``).

Layers *declare*: weights by the checkpoint's names, call sites by op, state by spec. They import no torch and compute
nothing themselves; a forward pass calls the plain functions that resolution put into their call sites.
"""

from evener.layers.alibi import alibi_slopes
from evener.layers.builder import Builder
from evener.layers.causal_lm import CausalLM
from evener.layers.decoder import AttentionConfig, DecoderLayer, DecoderStack, MLPConfig
from evener.layers.embedding import Embedding, LMHead
from evener.layers.experts import MoEConfig
from evener.layers.latent import LatentConfig
from evener.layers.rotary import LogNConfig, RotaryConfig, TemperatureConfig

__all__ = [
    "AttentionConfig", "Builder", "CausalLM", "DecoderLayer", "DecoderStack", "Embedding", "LMHead", "LatentConfig",
    "LogNConfig", "MLPConfig", "MoEConfig", "RotaryConfig", "TemperatureConfig", "alibi_slopes",
]  # fmt: skip
