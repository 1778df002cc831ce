"""The model that most families are: embedding, decoder layers, norm, head. A family describes its layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evener.contracts.architecture import Architecture, Step
from evener.layers.builder import Builder
from evener.layers.config_json import read_float, read_int, unsupported
from evener.layers.decoder import AttentionConfig, DecoderLayer, DecoderStack, MixerConfig, MixerLayer, MLPConfig
from evener.layers.embedding import Embedding, LMHead
from evener.layers.experts import MoEConfig
from evener.layers.norms import norm_common

if TYPE_CHECKING:
    import torch


class CausalLM(Architecture):
    """A causal language model. A family subclasses it, describes its layers and overrides what differs.

    This class reads these keys of ``config.json``: ``vocab_size``, ``max_position_embeddings``, ``hidden_size``,
    ``num_attention_heads`` and the key that ``eps_key`` names, which are required (the second is optional for a class
    that sets ``max_positions``); ``num_key_value_heads`` (it must divide the heads) and ``tie_word_embeddings``, which
    are optional. The number of layers is the length of what ``attention`` returns. A family reads all other keys
    itself. If its config has other names for the keys above, it overrides ``__init__`` and passes on a config with
    these names.

    Attributes:
        names: the checkpoint's names of the embedding, the layers, the last norm and the head, in this order; without
            ``.weight``, and without the layer's number, which follows after a dot.
        tied: the value of ``tie_word_embeddings`` if ``config.json`` has none.
        norm: kind of all norms: "rms", "layer" (without bias), "biased_layer" or "bare_layer" (without weight).
        norm_offset: added to the weights of all norms that have weights: those before and after attention and MLP, of
            heads, and the last one. It is not added to biases.
        eps_key: the key of the norms' epsilon in ``config.json``.
        head_bias: whether the head has a bias.
    """

    names: tuple[str, str, str, str] = ("model.embed_tokens", "model.layers", "model.norm", "lm_head")
    embedding: Embedding | None
    head: LMHead | None
    takes_head = True
    tied: bool = False
    norm: str = "rms"
    norm_offset: float = 0.0
    eps_key: str = "rms_norm_eps"
    head_bias: bool = False

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        config = {"max_position_embeddings": self.max_positions or None, **config}
        self.vocab_size, self.max_positions = (read_int(config, k) for k in ("vocab_size", "max_position_embeddings"))
        self.hidden_size = hidden = read_int(config, "hidden_size")
        heads, eps = read_int(config, "num_attention_heads"), read_float(config, self.eps_key)
        if config.get("num_key_value_heads") and heads % read_int(config, "num_key_value_heads"):
            raise unsupported(config, "num_key_value_heads", f"it must divide num_attention_heads = {heads}")
        self.embedding = self.head = None
        if build.first_stage:
            scale = self.embedding_scale(config)
            self.embedding = Embedding(build, f"{self.names[0]}.weight", self.vocab_size, hidden, scale)
        mixers = self.attention(config)
        held = ((i, mixers[i], self.mlp(config, i)) for i in build.layers(len(mixers)))
        layers = (self.declare_layer(build, f"{self.names[1]}.{i}", hidden, mixer, mlp, eps) for i, mixer, mlp in held)
        self.stack = DecoderStack(list(layers))
        if build.last_stage:
            self.head = self._declare_head(config, build, hidden, eps)

    def declare_layer(
        self, build: Builder, prefix: str, hidden: int, mixer: AttentionConfig | MixerConfig,
        mlp: MLPConfig | MoEConfig, eps: float,
    ) -> DecoderLayer:  # fmt: skip
        """Declare a layer of this family whose names begin with ``prefix``."""
        if isinstance(mixer, AttentionConfig):
            return DecoderLayer(build, prefix, hidden, mixer, mlp, eps, self.norm_offset, self.norm)
        return MixerLayer(build, prefix, hidden, mixer, mlp, eps, self.norm_offset, self.norm)

    def _declare_head(self, config: Mapping[str, Any], build: Builder, hidden: int, eps: float) -> LMHead:
        common = norm_common(build, hidden, eps, self.norm_offset, self.norm)
        if build.head is not None:
            return build.head(build, self.names, common)  # type: ignore[no-any-return]
        name, twin = f"{self.names[3]}.weight", f"{self.names[0]}.weight"
        if config.get("tie_word_embeddings", self.tied):
            build.tie(name, twin)
            name = twin
        return LMHead(
            build, name, self.names[2], self.vocab_size, common, cap=self.logit_cap(config),
            scale=self.logit_scale(config), bias=f"{self.names[3]}.bias" if self.head_bias else None,
            normalize_rows=self.normalize_head(config),
        )  # fmt: skip

    @abstractmethod
    def attention(self, config: Mapping[str, Any]) -> Sequence[AttentionConfig | MixerConfig]:
        """The attention (or another token mixer) of each layer, ``num_hidden_layers`` of them."""

    @abstractmethod
    def mlp(self, config: Mapping[str, Any], layer: int) -> MLPConfig | MoEConfig:
        """The MLP or the experts of layer number ``layer``."""

    def embedding_scale(self, config: Mapping[str, Any]) -> float:
        """(optional) Factor on the embeddings. Default: 1."""
        return 1.0

    def logit_cap(self, config: Mapping[str, Any]) -> float | None:
        """(optional) Soft cap on the logits. Default: none."""
        return None

    def normalize_head(self, config: Mapping[str, Any]) -> bool:
        """(optional) Whether every row of the head is divided by its L2 norm. Default: no."""
        return False

    def logit_scale(self, config: Mapping[str, Any]) -> float:
        """(optional) Factor on the logits. Default: 1."""
        return 1.0

    def forward(self, step: Step) -> torch.Tensor:
        if self.embedding is not None:
            return self.stack(self.embedding(step), step)
        assert step.stream is not None, "a later stage continues with the stream of the stage before"
        return self.stack(step.stream[0], step, step.stream[1])

    def logits(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        assert self.head is not None, "the last stage has the head"
        return self.head(hidden, step)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.head is not None, "the last stage has the head"
        return self.head.normed(hidden)

    def greedy(self, hidden: torch.Tensor, step: Step) -> torch.Tensor | None:
        assert self.head is not None, "the last stage has the head"
        return self.head.greedy(hidden, step)
