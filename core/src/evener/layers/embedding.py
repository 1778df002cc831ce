"""The embedding at the bottom and the language-model head on top."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evener.contracts.architecture import Step
from evener.layers.builder import Builder
from evener.layers.declared import Span
from evener.layers.norms import declare_norm

if TYPE_CHECKING:
    import torch


def share_vocab(build: Builder, vocab: int) -> Span:
    """This rank's ids: equally many on each, but for the last rank."""
    return build.share(vocab, "vocabulary entries", unit=-(-vocab // build.ranks))


class Embedding:
    """Token embedding [vocab, hidden], optionally scaled. Ranks share the rows."""

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
        """[T, hidden] for ``step.token_ids``, and for what stands in place of some."""
        rows: torch.Tensor = self.site.table[step.bucket](step.token_ids, self.weight.value)
        # As the engine's tables are written: every device's torch copies rows. Captured steps have none of these.
        return rows if step.overlay is None else rows.index_copy(0, *step.overlay)


class LMHead:
    """Final norm and projection to the vocabulary, whose rows ranks share.

    Args:
        build: where it declares itself.
        name: of the weight; a tied head is declared under the embedding's.
        norm: name of the norm, without ``.weight``.
        vocab: rows.
        common: hidden, dtype, and eps, offset and kind of the norm.
        cap: soft cap on the logits, or None; scale: factor on them.
        bias: name of a bias, or None.
        unit_rows: rows of the weight are divided by their lengths.
    """

    def __init__(
        self, build: Builder, name: str, norm: str, vocab: int, common: Mapping[str, Any], *, cap: float | None = None,
        scale: float = 1.0, bias: str | None = None, unit_rows: bool = False,
    ) -> None:  # fmt: skip
        rows = share_vocab(build, vocab)
        self.norm = declare_norm(build, norm, common["hidden"], common, "float32")
        self.weight = build.linear(name, {name: rows}, common["hidden"], out="float32", unit_rows=unit_rows)
        self.bias = build.weight(bias, rows, dummy="zeros") if bias else None
        static = {k: common[k] for k in ("hidden", "dtype", "eps", "offset", "norm")}
        static |= {"vocab": vocab, "weight": self.weight, "logit_scale": scale, "cap": cap}
        self.site = build.op("head", name, **static, communicator=build.communicator)
        shared = build.communicator is not None
        self.best = build.op("vocab_greedy", name, **static, communicator=build.communicator) if shared else None

    def __call__(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """Logits float32 [R, vocab] of the stream's rows, float32 [R, hidden]."""
        norm, bias = (None if w is None else w.value for w in (self.norm, self.bias))
        return self.site.table[step.bucket](hidden, norm, self.weight.value, bias)  # type: ignore[no-any-return]

    def greedy(self, hidden: torch.Tensor, step: Step) -> torch.Tensor | None:
        """Ids int32 [R] of the largest logits, which ranks find in their own rows; None on one rank."""
        if self.best is None:
            return None
        norm, bias = (None if w is None else w.value for w in (self.norm, self.bias))
        return self.best.table[step.bucket](hidden, norm, self.weight.value, bias)  # type: ignore[no-any-return]
