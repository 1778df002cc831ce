"""The embedding at the bottom and the language-model head on top."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evener.contracts.architecture import Step
from evener.layers.builder import Builder
from evener.layers.declared import Span

if TYPE_CHECKING:
    import torch


def share_vocab(build: Builder, vocab: int) -> Span:
    """This rank's ids: equally many on each, but for the last rank."""
    return build.share(vocab, "vocabulary entries", unit=-(-vocab // build.ranks))


class Embedding:
    """Token embedding [vocab, hidden], optionally scaled (Gemma). Ranks share the rows."""

    def __init__(self, build: Builder, name: str, vocab: int, hidden: int, scale: float = 1.0) -> None:
        rows = share_vocab(build, vocab)
        self.weight = build.weight(name, rows, hidden)
        static = {"hidden": hidden, "scale": scale, "dtype": build.dtype}
        if build.communicator is None:
            self.site = build.op("embedding", name, vocab=vocab, **static)
        else:
            place = {"start": rows.start, "rows": rows.size, "communicator": build.communicator}
            self.site = build.op("vocab_embedding", name, **place, **static)

    def __call__(self, step: Step) -> torch.Tensor:
        """[T, hidden] for ``step.token_ids``."""
        return self.site.table[step.bucket](step.token_ids, self.weight.value)  # type: ignore[no-any-return]


class LMHead:
    """Final norm and projection to the vocabulary, whose rows ranks share. A tied head is declared under the
    embedding's ``name``."""

    def __init__(
        self, build: Builder, name: str, norm: str, vocab: int, hidden: int, eps: float, offset: float = 0.0,
        cap: float | None = None,
    ) -> None:  # fmt: skip
        self.norm = build.weight(norm, hidden, dummy="zeros" if offset else "ones", dtype="float32")
        self.weight = build.linear(name, {name: share_vocab(build, vocab)}, hidden, out="float32")
        norm_static = {"hidden": hidden, "dtype": build.dtype, "eps": eps, "offset": offset}
        ranks = {"communicator": build.communicator}
        self.site = build.op("head", name, **norm_static, vocab=vocab, weight=self.weight, cap=cap, **ranks)

    def __call__(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """Logits float32 [R, vocab] of the stream's rows, float32 [R, hidden]."""
        return self.site.table[step.bucket](hidden, self.norm.value, self.weight.value, None)  # type: ignore[no-any-return]
