"""The layer for multi-token prediction (MTP) of DeepSeek V3 (DeepSeek-AI 2024, section 2.2) and GLM-4.5.

Checkpoints number it after the model's own layers. It joins the normed embedding of a token (``enorm``) with the normed
hidden state of the token before (``hnorm``), halves the width of that (``eh_proj``), and goes on like the model's last
layer. Embedding and head are the model's; checkpoints repeat them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evener.contracts.architecture import Step
from evener.layers import Builder, CausalLM
from evener.layers.config_json import layer_count, read_float, read_int
from evener.layers.norms import declare_norm, norm_common

if TYPE_CHECKING:
    import torch


class PredictionLayer:
    """The first of the layers, declared. Its model has been declared to the same builder before."""

    def __init__(self, model: CausalLM, config: Mapping[str, Any], build: Builder) -> None:
        number, hidden, eps = layer_count(config), model.hidden_size, read_float(config, model.eps_key)
        prefix = f"{model.names[1]}.{number}"
        common = norm_common(build, hidden, eps, model.norm_offset, model.norm)
        self._embedding, self._head = model.embedding, model.head
        sizes = {"hidden": hidden, "eps": eps, "offset": model.norm_offset}
        self._normed, self._hidden_norm, self._token_norm = (
            build.op("rms_norm", f"{prefix}.{name}", dtype=dtype, **sizes)
            for name, dtype in (("norm", "float32"), ("hnorm", "float32"), ("enorm", build.dtype))
        )
        self._hidden_weight = declare_norm(build, f"{prefix}.hnorm", hidden, common, "float32")
        self._token_weight = declare_norm(build, f"{prefix}.enorm", hidden, common)
        self._last_weight = declare_norm(build, f"{prefix}.shared_head.norm", hidden, common, "float32")
        self._joined = build.linear(f"{prefix}.eh_proj", {f"{prefix}.eh_proj.weight": hidden}, 2 * hidden)
        self._join = build.op("linear", f"{prefix}.eh_proj", weight=self._joined, rows=hidden, columns=2 * hidden,
                              dtype=build.dtype, out=build.dtype)  # fmt: skip
        mixer, mlp = model.attention(config)[-1], model.mlp(config, number)
        self._layer = model.declare_layer(build, prefix, hidden, mixer, mlp, eps)
        for name in ("embed_tokens", "shared_head.head"):
            build.ignore(rf"{re.escape(prefix)}\.{re.escape(name)}\.weight")

    def __call__(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """As ``Architecture.predict``."""
        import torch

        assert self._embedding is not None and self._head is not None, "one pipeline stage has both"
        assert self._head.norm is not None and self._hidden_weight is not None and self._token_weight is not None
        normed = self._normed.table[step.bucket](hidden, self._head.norm.value)
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
    """A family whose checkpoints may have ``num_nextn_predict_layers`` such layers. The first is read if drafts want
    it."""

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        super().__init__(config, build)
        layers, more = layer_count(config), read_int(config, "num_nextn_predict_layers", 1 << 10, least=0, default=0)
        self.predicts = build.predicts and more > 0
        self._prediction = PredictionLayer(self, config, build) if self.predicts else None
        for extra in range(self.predicts, more):
            build.ignore(rf"model\.layers\.{layers + extra}\..*")

    def predict(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        assert self._prediction is not None, "it was declared"
        return self._prediction(hidden, step)

    def predicted(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        assert self._prediction is not None, "it was declared"
        return self._prediction.logits(hidden, step)
