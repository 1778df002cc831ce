"""The layers that model families share. Public, with a contract version of its own (``layers``).

Layers *declare* to a ``Builder``: weights by their names in the checkpoint, call sites of ops, and state. They import
no torch and compute nothing themselves; a forward pass calls the functions that resolution put into their call sites.
"""

from evener.layers.builder import Builder
from evener.layers.causal_lm import CausalLM
from evener.layers.decoder import AttentionConfig, DecoderLayer, DecoderStack, MLPConfig
from evener.layers.embedding import Embedding, LMHead
from evener.layers.experts import MoEConfig
from evener.layers.latent import LatentConfig
from evener.layers.rotary import LogNConfig, RotaryConfig, TemperatureConfig

__all__ = [
    "AttentionConfig", "Builder", "CausalLM", "DecoderLayer", "DecoderStack", "Embedding", "LMHead", "LatentConfig",
    "LogNConfig", "MLPConfig", "MoEConfig", "RotaryConfig", "TemperatureConfig",
]  # fmt: skip
