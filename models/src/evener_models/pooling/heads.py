"""Heads beside that of a language model: what else can be computed from a model's last hidden states."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evener.contracts.architecture import Step
from evener.contracts.statics import NormStatic
from evener.layers.builder import Builder
from evener.layers.embedding import LMHead
from evener.layers.norms import declare_norm

if TYPE_CHECKING:
    import torch


class FinalNorm(LMHead):
    """The norm that a language model's head begins with, without the projection.

    Args:
        build: the builder to declare it to.
        names: ``CausalLM.names``: that of the norm, and of the head, which is not read.
        common: the width of the stream, and the norm (``norm_common``).
    """

    def __init__(self, build: Builder, names: Sequence[str], common: NormStatic) -> None:
        *_, name, head = names
        build.ignored.append(re.escape(head) + r"\.(weight|bias).*")
        self._width, self._offset, self._is_rms = common["hidden"], common["offset"], common["norm"] == "rms"
        self.norm, self.best = declare_norm(build, name, self._width, common, "float32"), None
        sizes = {"hidden": self._width, "dtype": "float32", "eps": common["eps"]}
        offset = {"offset": self._offset} if self._is_rms else {}
        self.site = build.op("rms_norm" if self._is_rms else "layer_norm", name, **sizes, **offset)

    def __call__(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """Normed rows float32 [R, hidden] of hidden states float32 [R, hidden]."""
        function, weight = self.site.table[step.bucket], None if self.norm is None else self.norm.value
        if self._is_rms:
            return function(hidden, weight)  # type: ignore[no-any-return]
        gain, bias = (None, None) if weight is None else (*weight.split(self._width), None)[:2]
        return function(hidden, gain if gain is None else gain + self._offset, bias)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class EncoderHead:
    """What an encoder of texts is asked to make of its last rows; the encoder declares it.

    Attributes:
        label: whether it is the logit of one label; else the rows are taken as they are.
        separator: the token behind the first text of a pair; None: the tokenizer puts none there, or all tokens are of
            one type.
    """

    label: bool = False
    separator: int | None = None

    def __call__(self, build: Builder, declare: Callable[[Builder], Any]) -> Any:
        """What ``declare`` makes, whole on every rank, if a label is wanted; else None."""
        return declare(build.replicated()) if self.label else None


def label_head(build: Builder, names: Sequence[str], common: NormStatic) -> LMHead:
    """The head of a model that scores texts: ``score.weight`` [1, hidden] after the last norm; whole on every rank."""
    return LMHead(build.replicated(), "score.weight", names[2], 1, common)
