"""The token embedding and the language model head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evener.contracts.architecture import Step
from evener.contracts.declared import CallSite, Span
from evener.contracts.ops import OpFunction
from evener.contracts.statics import HeadStatic, NormStatic
from evener.layers.builder import Builder
from evener.layers.norms import declare_norm
from evener.ops.norms import any_norm

if TYPE_CHECKING:
    import torch


def shard_vocab(build: Builder, vocab: int) -> Span:
    """This rank's ids: an equal number on each rank, except that the last ranks may have fewer."""
    return build.shard(vocab, "vocabulary entries", unit=-(-vocab // build.ranks))


class Embedding:
    """Token embedding [vocab, hidden], times ``scale``. Ranks share the rows (Shoeybi et al. 2019).

    On one rank a quantized table stays quantized if a kernel reads it so; otherwise it is dequantized at load.
    """

    def __init__(self, build: Builder, name: str, vocab: int, hidden: int, scale: float = 1.0) -> None:
        rows = shard_vocab(build, vocab)
        packed = build.communicator is None and any(not part.format.plain for part in build.stored([name]))
        table = build.linear(name, {name: rows}, hidden, op="embedding") if packed else None
        self.weight: Any = table or build.weight(name, rows, hidden)
        form = {"hidden": hidden, "scale": scale, "dtype": build.dtype}
        if build.communicator is None:
            self.site = build.op("embedding", name, **form, vocab=vocab, weight=table)
        else:
            own = {"start": rows.start, "rows": rows.size, "communicator": build.communicator}
            self.site = build.op("vocab_embedding", name, **form, **own)

    def __call__(self, step: Step) -> torch.Tensor:
        """The rows [T, hidden] of ``step.token_ids``, with ``step.embedding_overrides`` in place of some."""
        # A dequantized table is a tensor, which every kernel reads.
        table = self.weight.value.data if getattr(self.weight, "layout", "") == "plain" else self.weight.value
        rows: torch.Tensor = self.site.table[step.bucket](step.token_ids, table)
        # index_copy, because every device's torch implements it. Steps that are captured have no overrides.
        return rows if step.embedding_overrides is None else rows.index_copy(0, *step.embedding_overrides)


class LMHead:
    """Final norm and projection to the vocabulary. Ranks share the vocabulary's rows.

    Args:
        build: the builder to declare it to.
        name: of the weight, with ``.weight``; a tied head is declared under the embedding's name.
        norm: name of the norm, without ``.weight``.
        vocab: number of rows, of all ranks.
        common: the width of the stream, and the norm (``norm_common``).
        cap: soft cap on the logits, or None.
        scale: factor on the logits.
        bias: name of a bias, or None.
        normalize_rows: divide every row of the weight by its L2 norm.
    """

    def __init__(
        self, build: Builder, name: str, norm: str, vocab: int, common: NormStatic, *, cap: float | None = None,
        scale: float = 1.0, bias: str | None = None, normalize_rows: bool = False,
    ) -> None:  # fmt: skip
        rows, self._common = shard_vocab(build, vocab), common
        self.norm = declare_norm(build, norm, common["hidden"], common, "float32")
        self.weight = build.linear(name, {name: rows}, common["hidden"], out="float32", normalize_rows=normalize_rows)
        self.bias = build.weight(bias, rows, dummy="zeros") if bias else None
        static: HeadStatic = {
            **common, "vocab": vocab, "weight": self.weight, "logit_scale": scale, "cap": cap,
            "communicator": build.communicator,
        }  # fmt: skip
        self.site = build.op("head", name, **static)
        self.best: CallSite | None = build.op("vocab_greedy", name, **static)

    def __call__(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """Logits float32 [R, vocab] of hidden states float32 [R, hidden]."""
        return self._call(self.site, hidden, step)

    def greedy(self, hidden: torch.Tensor, step: Step) -> torch.Tensor | None:
        """Ids int32 [R] of the largest logits; each rank looks in its own rows first. None without a vocabulary."""
        return None if self.best is None else self._call(self.best, hidden, step)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The norm alone, float32 [R, hidden], of hidden states float32 [R, hidden]. It runs in plain torch: a head has
        no call of its own for it, and it is asked for rarely."""
        from evener.ops.reference import norm as reference

        def use(op: str, /, **static: Any) -> OpFunction:
            return getattr(reference, op)(static, use)  # type: ignore[no-any-return]

        weight = None if self.norm is None else self.norm.value
        return any_norm({**self._common, "dtype": "float32"}, use)(hidden, weight)  # type: ignore[no-any-return]

    def _call(self, site: CallSite, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        norm, bias = (None if w is None else w.value for w in (self.norm, self.bias))
        return site.table[step.bucket](hidden, norm, self.weight.value, bias)  # type: ignore[no-any-return]
