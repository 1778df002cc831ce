"""The embedding at the bottom and the language-model head on top."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evener.contracts.architecture import Step
from evener.layers.builder import Builder

if TYPE_CHECKING:
    import torch


class Embedding:
    """Token embedding [vocab, hidden], optionally scaled (Gemma)."""

    def __init__(self, build: Builder, name: str, vocab: int, hidden: int, scale: float = 1.0) -> None:
        self.weight = build.weight(name, vocab, hidden)
        self.site = build.op("embedding", name, hidden=hidden, vocab=vocab, scale=scale, dtype=build.dtype)

    def __call__(self, step: Step) -> torch.Tensor:
        """[T, hidden] for ``step.token_ids``."""
        return self.site.table[step.bucket](step.token_ids, self.weight.value)  # type: ignore[no-any-return]


class LMHead:
    """Final norm and projection to the vocabulary. A tied head is declared under the embedding's ``name``."""

    def __init__(
        self, build: Builder, name: str, norm: str, vocab: int, hidden: int, eps: float, offset: float = 0.0,
        cap: float | None = None,
    ) -> None:  # fmt: skip
        self.norm = build.weight(norm, hidden, dummy="zeros" if offset else "ones", dtype="float32")
        self.weight = build.linear(name, {name: vocab}, hidden, out="float32")
        norm_static = {"hidden": hidden, "dtype": build.dtype, "eps": eps, "offset": offset}
        self.site = build.op("head", name, **norm_static, vocab=vocab, weight=self.weight, cap=cap)

    def __call__(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """Logits float32 [R, vocab] of the stream's rows, float32 [R, hidden]."""
        return self.site.table[step.bucket](hidden, self.norm.value, self.weight.value, None)  # type: ignore[no-any-return]
