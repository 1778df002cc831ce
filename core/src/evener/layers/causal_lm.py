"""The model that most families are: embedding, decoder layers, norm, head. A family says what its layers are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evener.contracts.architecture import Architecture, Step
from evener.layers.builder import Builder
from evener.layers.decoder import AttentionConfig, DecoderLayer, DecoderStack, MixerConfig, MixerLayer, MLPConfig
from evener.layers.embedding import Embedding, LMHead
from evener.layers.experts import MoEConfig
from evener.layers.settings import count, number, refuse

if TYPE_CHECKING:
    import torch


class CausalLM(Architecture):
    """Weights are named ``model.embed_tokens``, ``model.layers.<i>``, ``model.norm`` and ``lm_head``.

    Attributes:
        tied: what ``tie_word_embeddings`` is when ``config.json`` does not say.
        norm_offset: added to the weights of all norms.
    """

    tied = False
    norm_offset = 0.0

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        self.vocab_size, self.max_positions = (count(config, k) for k in ("vocab_size", "max_position_embeddings"))
        hidden, eps = count(config, "hidden_size"), number(config, "rms_norm_eps")
        heads = count(config, "num_attention_heads")
        if config.get("num_key_value_heads") and heads % count(config, "num_key_value_heads"):
            raise refuse(config, "num_key_value_heads", f"it must divide num_attention_heads = {heads}")
        self.embedding = Embedding(
            build, "model.embed_tokens.weight", self.vocab_size, hidden, self.embedding_scale(config)
        )
        names = enumerate(self.attention(config))
        layers = (self._layer(build, f"model.layers.{i}", hidden, a, self.mlp(config, i), eps) for i, a in names)
        self.stack = DecoderStack(list(layers))
        self.head = self._declare_head(config, build, hidden, eps)

    def _layer(
        self, build: Builder, prefix: str, hidden: int, mixer: AttentionConfig | MixerConfig,
        mlp: MLPConfig | MoEConfig, eps: float,
    ) -> DecoderLayer:  # fmt: skip
        if isinstance(mixer, AttentionConfig):
            return DecoderLayer(build, prefix, hidden, mixer, mlp, eps, self.norm_offset)
        return MixerLayer(build, prefix, hidden, mixer, mlp, eps, self.norm_offset)

    def _declare_head(self, config: Mapping[str, Any], build: Builder, hidden: int, eps: float) -> LMHead:
        name = "lm_head.weight"
        if config.get("tie_word_embeddings", self.tied):
            build.tie(name, "model.embed_tokens.weight")
            name = "model.embed_tokens.weight"
        return LMHead(
            build, name, "model.norm.weight", self.vocab_size, hidden, eps, self.norm_offset, self.logit_cap(config)
        )

    @abstractmethod
    def attention(self, config: Mapping[str, Any]) -> Sequence[AttentionConfig | MixerConfig]:
        """What mixes tokens in each layer, ``num_hidden_layers`` of them."""

    @abstractmethod
    def mlp(self, config: Mapping[str, Any], layer: int) -> MLPConfig | MoEConfig:
        """The MLP, or the experts, of one layer."""

    def embedding_scale(self, config: Mapping[str, Any]) -> float:
        """(optional) Factor on embedding rows. Default 1."""
        del config
        return 1.0

    def logit_cap(self, config: Mapping[str, Any]) -> float | None:
        """(optional) Soft cap on the logits. Default: none."""
        del config
        return None

    def forward(self, step: Step) -> torch.Tensor:
        return self.stack(self.embedding(step), step)

    def logits(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        return self.head(hidden, step)
