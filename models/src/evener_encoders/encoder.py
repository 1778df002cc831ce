"""What encoders of texts have in common: embeddings, layers, and what is made of the last rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evener.contracts.architecture import Architecture, Step
from evener.contracts.declared import Weight
from evener.errors import ArchitectureError
from evener.layers import Builder, Embedding
from evener.layers.config_json import read_int, unsupported
from evener_encoders.layers import EncoderLayer, EncoderLayerConfig, LabelHead, Norm
from evener_models.config_values import layer_count
from evener_models.pooling.heads import EncoderHead

if TYPE_CHECKING:
    import torch


class TextEncoder(Architecture):
    """An encoder of texts. A family subclasses it and describes its embeddings, layers and head.

    ``config.json`` has ``vocab_size``, ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads`` and
    ``max_position_embeddings``; a family whose config has other names passes on one with these (``with_names``).

    Attributes:
        names: the checkpoint's names of the token embedding and of the layers, with the name of the outermost module.
            Checkpoints may leave that out.
        embedding_names: of the position and token type embeddings after that of the outermost module; None: there are
            none. The last is the norm of their sum.
        last_norm: of the norm after the last layer; None: there is none.
        unread: regular expressions for checkpoint tensors of other tasks; unread_by_head: those beside a head for a
            label.
    """

    takes_head = True
    oracle = "transformers"
    names: tuple[str, str]
    embedding_names: tuple[str | None, str | None, str]
    last_norm: str | None = None
    unread: Sequence[str] = ()
    unread_by_head: Sequence[str] = ()

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        config, head = self.with_names(config), build.head
        if config.get("is_decoder") or config.get("add_cross_attention"):
            raise unsupported(config, "is_decoder", "an encoder neither is a decoder nor reads from one")
        if head is not None and not isinstance(head, EncoderHead):
            raise ArchitectureError(f"{type(self).__name__} is an encoder: its pooling reader must give an EncoderHead")
        self.vocab_size, self.hidden_size = (read_int(config, key) for key in ("vocab_size", "hidden_size"))
        width, rows = self.hidden_size, read_int(config, "max_position_embeddings")
        layers = [self.layer(config, i) for i in range(layer_count(config))]
        if width % layers[0].heads:
            raise unsupported(config, "num_attention_heads", f"it must divide hidden_size = {width}")
        self.max_positions = self.longest_text(config) or 0
        self._first_position = rows - self.max_positions
        self._embedding = Embedding(build, f"{self.names[0]}.weight", self.vocab_size, width)
        positions, types, norm = self.embedding_names
        kinds = 0 if types is None else read_int(config, "type_vocab_size", 1 << 10)
        self._positions = build.weight(f"{positions}.weight", rows, width) if positions else None
        self._types = build.weight(f"{types}.weight", kinds, width) if kinds else None
        self._separator = head.separator if head is not None and kinds > 1 else None
        self._norm = Norm(build, norm, width, layers[0].eps, layers[0].norm_bias)
        self._layers = [EncoderLayer(build, f"{self.names[1]}.{i}", layer) for i, layer in enumerate(layers)]
        bias = layers[-1].norm_bias
        self._last_norm = Norm(build, self.last_norm, width, layers[-1].eps, bias) if self.last_norm else None
        self._head = head
        self._label = head(build, lambda whole: self.label_head(config, whole)) if head is not None else None
        for pattern in (r".*\.position_ids", *(self.unread if self._label is None else self.unread_by_head)):
            build.ignore(pattern)

    @classmethod
    def with_names(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """(optional) A family's config with the names above. Default: ``config`` unchanged."""
        return config

    @classmethod
    def longest_text(cls, config: Mapping[str, Any]) -> int | None:
        return read_int(cls.with_names(config), "max_position_embeddings")

    @abstractmethod
    def layer(self, config: Mapping[str, Any], number: int) -> EncoderLayerConfig:
        """The layer of this ``number``."""

    @abstractmethod
    def label_head(self, config: Mapping[str, Any], build: Builder) -> LabelHead:
        """Declare the head for one label."""

    def forward(self, step: Step) -> torch.Tensor:
        """The last rows of the step's tokens after the last norm, float32 [T, hidden]."""
        x = self._embedding(step).float()
        if self._positions is not None:
            x = x + _value(self._positions).index_select(0, step.positions + self._first_position)
        if self._types is not None:
            x = x + _value(self._types)[self._segments(step)]
        x = self._norm(x)
        for layer in self._layers:
            x = layer(x, step)
        return x if self._last_norm is None else self._last_norm(x)

    def logits(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """The rows of ``forward`` as they are, float32 [R, hidden], or their logits of the label, [R, 1]."""
        if self._label is not None:
            return self._label(hidden)  # type: ignore[no-any-return]
        if self._head is None:
            raise ArchitectureError(f"{type(self).__name__} generates no text: embed with it, or score")
        return hidden

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def _segments(self, step: Step) -> Any:
        """The token type of each token: 0, or 1 behind the first separator of its text; int64 [T], or 0 for all."""
        if self._separator is None:
            return 0
        import torch

        separators = step.token_ids.eq(self._separator).long()
        before = separators.cumsum(0) - separators
        # A text begins at position 0, and its tokens are side by side.
        starts = torch.arange(len(before), device=before.device) - step.positions.long()
        return (before - before.index_select(0, starts)).clamp(max=1)


def _value(weight: Weight) -> torch.Tensor:
    assert weight.value is not None, "weights are loaded before a step"
    return weight.value
