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
from evener.layers.norms import norm_common
from evener.layers.settings import count, number, refuse

if TYPE_CHECKING:
    import torch


class CausalLM(Architecture):
    """A family sets what differs.

    Of ``config.json`` this class reads ``vocab_size``, ``max_position_embeddings``, ``hidden_size``,
    ``num_attention_heads``, what ``eps_key`` names, all of which must be there, and two that need not be:
    ``num_key_value_heads`` (it must divide the heads) and ``tie_word_embeddings``. There are as many layers as
    ``attention`` returns. Whatever else matters a family reads itself. One whose config has other names for these
    overrides ``__init__`` and hands on a config that has them.

    Attributes:
        names: what checkpoints call the embedding, the layers, the norm behind them and the head, in this order;
            without ``.weight``, and without the layer's number, which follows after a point.
        tied: what ``tie_word_embeddings`` is when ``config.json`` does not say.
        norm: kind of all norms: "rms", "layer", "biased_layer" or "bare_layer" (without a weight).
        norm_offset: added to the weights of all root mean square norms: those of layers, before and after a half, of
            heads, and the last one. Layer norms have none.
        eps_key: name of the norms' epsilon in ``config.json``.
        head_bias: whether the head has a bias.
    """

    names: tuple[str, str, str, str] = ("model.embed_tokens", "model.layers", "model.norm", "lm_head")
    embedding: Embedding | None
    head: LMHead | None
    tied: bool = False
    norm: str = "rms"
    norm_offset: float = 0.0
    eps_key: str = "rms_norm_eps"
    head_bias: bool = False

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        self.vocab_size, self.max_positions = (count(config, k) for k in ("vocab_size", "max_position_embeddings"))
        hidden, eps = count(config, "hidden_size"), number(config, self.eps_key)
        heads = count(config, "num_attention_heads")
        if config.get("num_key_value_heads") and heads % count(config, "num_key_value_heads"):
            raise refuse(config, "num_key_value_heads", f"it must divide num_attention_heads = {heads}")
        self.hidden_size = hidden
        self.embedding = self.head = None
        if build.first_stage:
            scale = self.embedding_scale(config)
            self.embedding = Embedding(build, f"{self.names[0]}.weight", self.vocab_size, hidden, scale)
        mixers = self.attention(config)
        held = ((i, mixers[i], self.mlp(config, i)) for i in build.layers(len(mixers)))
        layers = (self._layer(build, f"{self.names[1]}.{i}", hidden, mixer, mlp, eps) for i, mixer, mlp in held)
        self.stack = DecoderStack(list(layers))
        if build.last_stage:
            self.head = self._declare_head(config, build, hidden, eps)

    def _layer(
        self, build: Builder, prefix: str, hidden: int, mixer: AttentionConfig | MixerConfig,
        mlp: MLPConfig | MoEConfig, eps: float,
    ) -> DecoderLayer:  # fmt: skip
        if isinstance(mixer, AttentionConfig):
            return DecoderLayer(build, prefix, hidden, mixer, mlp, eps, self.norm_offset, self.norm)
        return MixerLayer(build, prefix, hidden, mixer, mlp, eps, self.norm_offset, self.norm)

    def _declare_head(self, config: Mapping[str, Any], build: Builder, hidden: int, eps: float) -> LMHead:
        name, twin = f"{self.names[3]}.weight", f"{self.names[0]}.weight"
        if config.get("tie_word_embeddings", self.tied):
            build.tie(name, twin)
            name = twin
        return LMHead(
            build, name, self.names[2], self.vocab_size,
            norm_common(build, hidden, eps, self.norm_offset, self.norm), cap=self.logit_cap(config),
            scale=self.logit_scale(config), bias=f"{self.names[3]}.bias" if self.head_bias else None,
            unit_rows=self.unit_head(config),
        )  # fmt: skip

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

    def unit_head(self, config: Mapping[str, Any]) -> bool:
        """(optional) Whether the head's rows are divided by their lengths. Default: no."""
        del config
        return False

    def logit_scale(self, config: Mapping[str, Any]) -> float:
        """(optional) Factor on the logits. Default 1."""
        del config
        return 1.0

    def forward(self, step: Step) -> torch.Tensor:
        if self.embedding is not None:
            return self.stack(self.embedding(step), step)
        assert step.stream is not None, "a later stage goes on with what the one before has sent"
        return self.stack(step.stream[0], step, step.stream[1])

    def logits(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        assert self.head is not None, "the last stage has the head"
        return self.head(hidden, step)

    def greedy(self, hidden: torch.Tensor, step: Step) -> torch.Tensor | None:
        assert self.head is not None, "the last stage has the head"
        return self.head.greedy(hidden, step)
