"""Schemas of what ranks do together. Torch-free. Without ranks nothing calls them."""

from __future__ import annotations

from evener.contracts.ops import OpSchema, tensors
from evener.ops.latent_schemas import BLOCK_NORM

_REF = "evener.ops.reference.ranks"
_COMP = "evener.ops.ranks"
_CASES = "evener.testing.conformance.cases.ranks"
_SUM = {
    "communicator": "the ranks that share the layer", "hidden": "H, width of the rows", "dtype": "compute type"
}  # fmt: skip

RANK_PRIMITIVES: tuple[OpSchema, ...] = (
    OpSchema(
        name="all_reduce", reference=f"{_REF}:all_reduce", cases=f"{_CASES}:all_reduce",
        doc="The sum of all ranks' x, the same bits on each.",
        static=_SUM, inputs=tensors("x T,hidden donated"), outputs=tensors("y T,hidden"),
    ),
    OpSchema(
        name="all_gather", reference=f"{_REF}:all_gather", cases=f"{_CASES}:all_gather",
        doc="The ranks' columns side by side, in rank order. Each has ``columns`` of them; the last ranks may have "
            "fewer, so that ``total`` are left.",
        static={"communicator": _SUM["communicator"], "columns": "of the first rank", "total": "of all ranks",
                "dtype": "compute type"},
        inputs=tensors("x R,columns"), outputs=tensors("y R,total"),
    ),
)  # fmt: skip

RANK_COMPOSITES: tuple[OpSchema, ...] = (
    OpSchema(
        name="all_reduce_norm", reference=f"{_COMP}:all_reduce_norm", cases=f"{_CASES}:all_reduce_norm", composite=True,
        doc="all_reduce, norm.",
        static={**_SUM, "eps": "added to the mean square", "offset": "added to the weight", "norm": BLOCK_NORM},
        inputs=tensors("x T,hidden donated; weight hidden"), outputs=tensors("y T,hidden"),
    ),
    OpSchema(
        name="vocab_embedding", reference=f"{_COMP}:vocab_embedding", cases=f"{_CASES}:vocab_embedding", composite=True,
        doc="embedding of the ids whose rows this rank holds, zeros for the others, all_reduce.",
        static={**_SUM, "start": "id of the first row that this rank holds", "rows": "how many it holds",
                "scale": "factor on the rows"},
        inputs=tensors("ids T int32; table rows,hidden"), outputs=tensors("y T,hidden"),
    ),
    OpSchema(
        name="vocab_greedy", reference=f"{_COMP}:vocab_greedy", cases=f"{_CASES}:vocab_greedy", composite=True,
        weights=("weight",),
        doc="The ids of the largest logits: head over this rank's rows of the vocabulary, greedy, all_gather of each "
            "rank's best, the best of these.",
        static={**_SUM, "eps": "added to the mean square", "offset": "added to the weight", "norm": BLOCK_NORM,
                "vocab": "V", "weight": "the declared LinearWeight of the head",
                "logit_scale": "factor on the logits", "cap": "soft cap or None"},
        inputs=tensors("x R,hidden float32 donated; norm hidden float32 optional; weight vocab,hidden packed; bias "
                       "vocab optional"),
        outputs=tensors("ids R int32"),
    ),
)  # fmt: skip
