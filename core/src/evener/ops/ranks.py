"""Composites whose layers are shared between ranks (Shoeybi et al. 2019): the part of one rank, then the sum over all.

A block over ranks expands into the same block of one rank, whose result is one summand of its output: so a kernel that
fuses a block serves between two sums, and knows nothing of ranks. The float32 stream beside it is the same everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evener.contracts.ops import OpFunction, Use
from evener.ops.norms import Static, any_norm

if TYPE_CHECKING:
    import torch

_SUM = ("communicator", "hidden", "dtype")


def all_reduce_norm(static: Static, use: Use) -> OpFunction:
    reduce = use("all_reduce", **{k: static[k] for k in _SUM})
    norm = any_norm(static, use)

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return norm(reduce(x), weight)  # type: ignore[no-any-return]

    return run


def summed(op: str, static: Static, use: Use, weights: int) -> OpFunction:
    """The block ``op`` over ranks, where ``static["communicator"]`` is set.

    Args:
        weights: index of its weights among its inputs; they hold the norm after the sum, if there is one.
    """
    post = bool(static.get("post_norm"))
    alone = {**static, "communicator": None, **({"post_norm": False} if post else {})}
    inner = use(op, **alone)
    form = {k: static[k] for k in (*_SUM, *(("eps", "offset", "norm") if post else ()))}
    reduce = use("all_reduce_norm" if post else "all_reduce", **form)

    kept: list[Any] = [None, None]

    def without_norm(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs, for a block that has no norm after it; the same objects at every step, which kernels want."""
        if kept[0] is not inputs[weights]:
            kept[:] = inputs[weights], inputs[weights]._replace(post_norm=None)
        return (*inputs[:weights], kept[1], *inputs[weights + 1 :])

    def run(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, stream = inner(*(without_norm(inputs) if post else inputs))
        return (reduce(x, inputs[weights].post_norm) if post else reduce(x)), stream

    return run


def vocab_embedding(static: Static, use: Use) -> OpFunction:
    start, rows = static["start"], static["rows"]
    look = use("embedding", vocab=rows, **{k: static[k] for k in ("hidden", "dtype", "scale")})
    reduce = use("all_reduce", **{k: static[k] for k in _SUM})

    def run(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        own = ids - start
        found = look(own.clamp(0, rows - 1), table)
        return reduce(found.masked_fill_(((own < 0) | (own >= rows))[:, None], 0))  # type: ignore[no-any-return]

    return run


def vocab_head(static: Static, use: Use) -> OpFunction:
    """The ``head`` over ranks: each has the logits of its rows of the vocabulary, then all have all."""
    vocab, rows, communicator = static["vocab"], static["weight"].rows, static["communicator"]
    inner = use("head", **{**static, "communicator": None, "vocab": rows})
    columns = -(-vocab // communicator.size)
    gather = use("all_gather", communicator=communicator, columns=columns, total=vocab, dtype="float32")

    def run(*inputs: Any) -> torch.Tensor:
        return gather(inner(*inputs))  # type: ignore[no-any-return]

    return run


def vocab_greedy(static: Static, use: Use) -> OpFunction:
    """Each rank's best row and its logit, then the best of them; ranks are in the order of their rows."""
    vocab, rows, communicator = static["vocab"], static["weight"].rows, static["communicator"]
    size = communicator.size
    start = communicator.rank * -(-vocab // size)
    inner = use("head", **{**static, "communicator": None, "vocab": rows})
    best = use("greedy", vocab=rows)
    gather = use("all_gather", communicator=communicator, columns=2, total=2 * size, dtype="float32")

    def run(*inputs: Any) -> torch.Tensor:
        import torch

        logits = inner(*inputs)
        ids = best(logits).long()[:, None]
        # float32 holds every id exactly: vocabularies are far below 2 ** 24.
        mine = torch.cat((logits.gather(1, ids), (ids + start).float()), dim=1)
        values, named = gather(mine).view(-1, size, 2).unbind(-1)
        return named.gather(1, values.argmax(1, keepdim=True))[:, 0].to(torch.int32)  # type: ignore[no-any-return]

    return run
