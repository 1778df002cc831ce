"""References of composite ops with tensor parallelism (Shoeybi et al. 2019): one rank's part, then the sum over ranks.

A block over several ranks uses the same block of one rank, whose result is one summand of the output. So a fused kernel
for the block needs to know nothing of ranks. The float32 residual is the same on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evener.contracts.ops import OpFunction, Static, Use
from evener.contracts.statics import AllReduceNormStatic, HeadStatic, VocabEmbeddingStatic
from evener.ops.norms import any_norm

if TYPE_CHECKING:
    import torch


def all_reduce_norm(static: AllReduceNormStatic, use: Use) -> OpFunction:
    reduce = use("all_reduce", communicator=static["communicator"], hidden=static["hidden"], dtype=static["dtype"])
    norm = any_norm(static, use)

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return norm(reduce(x), weight)  # type: ignore[no-any-return]

    return run


def all_reduce_block(op: str, static: Static, use: Use, weights: int) -> OpFunction:
    """The block ``op`` over several ranks; ``static["communicator"]`` is set.

    Args:
        weights: index of the weights among the inputs; they have the weight of the norm after the sum, if there is one.
    """
    post = bool(static.get("post_norm"))
    inner = use(op, **{**static, "communicator": None, **({"post_norm": False} if post else {})})
    form = {k: static[k] for k in ("communicator", "hidden", "dtype", *(("eps", "offset", "norm") if post else ()))}
    reduce = use("all_reduce_norm" if post else "all_reduce", **form)

    kept: list[Any] = [None, None]

    def without_norm(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs with ``post_norm`` None. The same object at every step: kernels cache what they derive from it."""
        if kept[0] is not inputs[weights]:
            kept[:] = inputs[weights], inputs[weights]._replace(post_norm=None)
        return (*inputs[:weights], kept[1], *inputs[weights + 1 :])

    def run(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, stream = inner(*(without_norm(inputs) if post else inputs))
        return (reduce(x, inputs[weights].post_norm) if post else reduce(x)), stream

    return run


def vocab_embedding(static: VocabEmbeddingStatic, use: Use) -> OpFunction:
    start, rows = static["start"], static["rows"]
    shape: Static = {"hidden": static["hidden"], "dtype": static["dtype"]}
    embed = use("embedding", vocab=rows, scale=static["scale"], **shape)
    reduce = use("all_reduce", communicator=static["communicator"], **shape)

    def run(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        own = ids - start
        found = embed(own.clamp(0, rows - 1), table)
        return reduce(found.masked_fill_(((own < 0) | (own >= rows))[:, None], 0))  # type: ignore[no-any-return]

    return run


def vocab_head(static: HeadStatic, use: Use) -> OpFunction:
    """The ``head`` over several ranks: each computes the logits of its rows of the vocabulary, then all get all."""
    vocab, rows, communicator = static["vocab"], static["weight"].rows, static["communicator"]
    assert communicator is not None, "ranks share the vocabulary"
    alone: Static = {**static, "communicator": None, "vocab": rows}
    inner = use("head", **alone)
    columns = -(-vocab // communicator.size)
    gather = use("all_gather", communicator=communicator, columns=columns, total=vocab, dtype="float32")

    def run(*inputs: Any) -> torch.Tensor:
        return gather(inner(*inputs))  # type: ignore[no-any-return]

    return run


def vocab_greedy(static: HeadStatic, use: Use) -> OpFunction:
    """Each rank's best id and its logit, then the best of them. A later rank has higher ids, so ties go to
    the lowest id."""
    vocab, rows, communicator = static["vocab"], static["weight"].rows, static["communicator"]
    alone: Static = {**static, "communicator": None, "vocab": rows}
    inner, best = use("head", **alone), use("greedy", vocab=rows)
    if communicator is None:
        return lambda *inputs: best(inner(*inputs))
    size = communicator.size
    start = communicator.rank * -(-vocab // size)
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
