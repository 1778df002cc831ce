"""The layer for multi-token prediction (MTP) of DeepSeek V3 (DeepSeek-AI 2024, section 2.2), GLM-4.5 and Qwen3-Next.

It joins the normed embedding of a token with the normed hidden state of the token before, halves the width of that, and
goes on like the model's last layer. Embedding and head are the model's; some checkpoints repeat them. DeepSeek V3 and
GLM-4.5 number the layer after the model's own. Qwen3-Next has it apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evener.contracts.architecture import Step
from evener.layers import Builder, CausalLM
from evener.layers.config_json import read_float, read_int
from evener.layers.decoder import AttentionConfig, MixerConfig
from evener.layers.norms import declare_norm, norm_common
from evener_models.config_values import layer_count

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PredictionNames:
    """What checkpoints call it, without ``.weight``: the decoder layer, and after ``prefix`` the norms of embedding,
    hidden state and result, and the projection of what is joined."""

    prefix: str
    layer: str
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    join: str = "eh_proj"
    norm: str = "shared_head.norm"


class PredictionLayer:
    """The layer, declared. Its model has been declared to the same builder before.

    Args:
        number: of the layer, which says whether it has experts.
    """

    def __init__(
        self, model: Predicting, config: Mapping[str, Any], build: Builder, names: PredictionNames, number: int
    ) -> None:
        hidden, eps, prefix = model.hidden_size, read_float(config, model.eps_key), names.prefix
        common = norm_common(build, hidden, eps, model.norm_offset, model.norm)
        self._embedding, self._head = model.embedding, model.head
        sizes = {"hidden": hidden, "eps": eps, "offset": model.norm_offset}
        self._normed, self._hidden_norm, self._token_norm = (
            build.op("rms_norm", f"{prefix}.{name}", dtype=dtype, **sizes)
            for name, dtype in (
                ("model_norm", "float32"),
                (names.hidden_norm, "float32"),
                (names.embedding_norm, build.dtype),
            )
        )
        self._hidden_weight = declare_norm(build, f"{prefix}.{names.hidden_norm}", hidden, common, "float32")
        self._token_weight = declare_norm(build, f"{prefix}.{names.embedding_norm}", hidden, common)
        self._last_weight = declare_norm(build, f"{prefix}.{names.norm}", hidden, common, "float32")
        join = f"{prefix}.{names.join}"
        self._joined = build.linear(join, {f"{join}.weight": hidden}, 2 * hidden)
        self._join = build.op("linear", join, weight=self._joined, rows=hidden, columns=2 * hidden,
                              dtype=build.dtype, out=build.dtype)  # fmt: skip
        mixer, mlp = model.mixer_of_prediction(config), model.mlp(config, number)
        self._layer = model.declare_layer(build, names.layer, hidden, mixer, mlp, eps)

    def __call__(self, hidden: torch.Tensor, step: Step, own: bool) -> torch.Tensor:
        """As ``Architecture.predict``."""
        import torch

        assert self._embedding is not None and self._head is not None, "one pipeline stage has both"
        assert self._head.norm is not None and self._hidden_weight is not None and self._token_weight is not None
        assert self._last_weight is not None
        # The model's hidden states come after its last norm, so the layer's own come after its last one.
        normed = self._normed.table[step.bucket](hidden, (self._last_weight if own else self._head.norm).value)
        states = self._hidden_norm.table[step.bucket](normed, self._hidden_weight.value)
        tokens = self._token_norm.table[step.bucket](self._embedding(step), self._token_weight.value)
        both = torch.cat((tokens, states.to(tokens.dtype)), dim=1)
        x, residual = self._layer(self._join.table[step.bucket](both, self._joined.value, None), None, step)
        return x + residual

    def logits(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """As ``Architecture.predicted``."""
        head, norm = self._head, self._last_weight
        assert head is not None and norm is not None
        return head.site.table[step.bucket](hidden, norm.value, head.weight.value, None)  # type: ignore[no-any-return]


class Predicting(CausalLM):
    """A family whose models may have such a layer.

    Attributes:
        prediction: the layer, declared; None: it is not read.
    """

    prediction: PredictionLayer | None = None

    def mixer_of_prediction(self, config: Mapping[str, Any]) -> AttentionConfig | MixerConfig:
        """(optional) The attention of the layer. Default: that of the model's last one."""
        return self.attention(config)[-1]

    def predict(self, hidden: torch.Tensor, step: Step, own: bool = False) -> torch.Tensor:
        assert self.prediction is not None, "it was declared"
        return self.prediction(hidden, step, own)

    def predicted(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        assert self.prediction is not None, "it was declared"
        return self.prediction.logits(hidden, step)


class NumberedPrediction(Predicting):
    """A family whose checkpoints may have ``num_nextn_predict_layers`` such layers, numbered after the model's own. The
    first is read if drafts want it."""

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        super().__init__(config, build)
        layers, more = layer_count(config), read_int(config, "num_nextn_predict_layers", 1 << 10, least=0, default=0)
        self.predicts = build.predicts and more > 0
        if self.predicts:
            prefix = f"{self.names[1]}.{layers}"
            self.prediction = PredictionLayer(self, config, build, PredictionNames(prefix, prefix), layers)
            for name in ("embed_tokens", "shared_head.head"):
                build.ignore(rf"{re.escape(prefix)}\.{re.escape(name)}\.weight")
        for extra in range(self.predicts, more):
            build.ignore(rf"model\.layers\.{layers + extra}\..*")
