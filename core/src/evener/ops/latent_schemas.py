"""Schemas of latent attention's ops. Torch-free."""

from __future__ import annotations

from evener.contracts.ops import OpSchema, Tensor

_REF = "evener.ops.reference.latent"
_COMP = "evener.ops.latent"
_CASES = "evener.testing.latent_cases"
_LATENT = {
    "heads": "query heads",
    "nope_dim": "part of a head's query and key that is not rotated",
    "value_dim": "width of a head's value",
    "rank": "width of the latent",
    "dtype": "compute type",
    "kv_b": "the declared LinearWeight that makes keys and values of latents",
    "absorb": "none, absorb-without-precomp or absorb",
    "sparse": "whether each query reads chosen tokens only",
    "state": "the layer's StateSlot",
}

LATENT_PRIMITIVES: tuple[OpSchema, ...] = (
    OpSchema(
        name="head_linear",
        doc="y[t, h] = x[t, h] @ weight[h]ᵀ, or @ weight[h] where it is stored transposed: one matrix a head.",
        static={
            "heads": "matrices",
            "columns": "in-features",
            "rows": "out-features",
            "transposed": "whether weight is [heads, columns, rows] instead of [heads, rows, columns]",
            "dtype": "compute type",
        },
        inputs=(Tensor("x", ("T", "heads", "columns")), Tensor("weight", ("heads", "rows", "columns"))),
        outputs=(Tensor("y", ("T", "heads", "rows")),),
        reference=f"{_REF}:head_linear",
        cases=f"{_CASES}:head_linear",
    ),
    OpSchema(
        name="partial_attention",
        doc="Causal attention over a piece of one request's context, in float32, and the log of the sum of its weights;"
        " pieces are merged by the latter. Query t reads keys up to t + offset; where there are none, 0 and -inf.",
        static={"heads": "query, key and value heads", "scale": "factor on the scores", "dtype": "compute type"},
        inputs=(
            Tensor("query", ("T", "heads", "head_dim")),
            Tensor("key", ("S", "heads", "head_dim")),
            Tensor("value", ("S", "heads", "value_dim")),
            Tensor("offset", (), "int"),
        ),
        outputs=(Tensor("out", ("T", "heads", "value_dim"), "float32"), Tensor("total", ("T", "heads"), "float32")),
        reference=f"{_REF}:partial_attention",
        cases=f"{_CASES}:partial_attention",
    ),
)

LATENT_COMPOSITES: tuple[OpSchema, ...] = (
    OpSchema(
        name="latent_attend",
        doc="Attention of whole queries over latent state that is written: by absorption for requests that add one "
        "token (unless absorb is none) and for sparse layers, by expansion for the rest.",
        static=_LATENT,
        inputs=(
            Tensor("query", ("T", "heads", "head_dim")),
            Tensor("kv_b", ("rows", "rank"), "packed"),
            Tensor("matrices", ("rows", "rank"), optional=True),
            Tensor("views", (), "state"),
            Tensor("meta", (), "state"),
            Tensor("chosen", ("T", "top"), "int32", optional=True),
        ),
        outputs=(Tensor("out", ("T", "heads", "value_dim")),),
        reference=f"{_COMP}:latent_attend",
        composite=True,
        weights=("kv_b",),
        state=True,
    ),
    OpSchema(
        name="index_block",
        doc="A sparse indexer (DeepSeek-AI 2025, DSA): queries from the queries' latent, one key a token, layer norm,"
        " rotary, write, selection of the tokens that attention reads.",
        static={
            "hidden": "H, width of the rows",
            "heads": "index heads",
            "head_dim": "D of queries and the key",
            "rope_dim": "leading part that is rotated",
            "dtype": "compute type",
            "state": "the index's StateSlot",
            "q": "the declared LinearWeight of the queries",
            "k": "of the key",
            "weights": "of the heads' weights",
        },
        inputs=(
            Tensor("latent", ("T", "q_rank")),
            Tensor("x", ("T", "hidden")),
            Tensor("positions", ("T",), "int32"),
            Tensor("weights", (), "IndexWeights"),
            Tensor("views", (), "state"),
            Tensor("meta", (), "state"),
        ),
        outputs=(Tensor("chosen", ("T", "top"), "int32"),),
        reference=f"{_COMP}:index_block",
        composite=True,
        weights=("q", "k", "weights"),
        state=True,
    ),
    OpSchema(
        name="latent_attention_block",
        doc="(add +) norm, down-projections, inner norms, queries, rotary, write, (index_block,) latent_attend, output"
        " projection (DeepSeek-AI 2024, MLA).",
        static={
            **_LATENT,
            "hidden": "H, width of the rows",
            "eps": "added to the mean square by the first norm",
            "offset": "added to the first norm's weight",
            "rope_dim": "rotated part of a head's query, and of the key that all heads share",
            "q_rank": "width of the queries' latent; None makes queries directly",
            "interleaved": "rotate pairs (2i, 2i+1) instead of halves",
            "down": "the declared LinearWeight of (queries or their latent), latent and rotated key",
            "q": "of the queries, where there is a latent",
            "o": "of the output projection",
            "index": "static of the index_block, or None",
        },
        inputs=(
            Tensor("x", ("T", "hidden"), donated=True),
            Tensor("residual", ("T", "hidden"), "float32", donated=True, optional=True),
            Tensor("positions", ("T",), "int32"),
            Tensor("weights", (), "LatentWeights"),
            Tensor("views", (), "state"),
            Tensor("meta", (), "state"),
            Tensor("index_weights", (), "IndexWeights", optional=True),
            Tensor("index_views", (), "state", optional=True),
            Tensor("index_meta", (), "state", optional=True),
        ),
        outputs=(Tensor("x", ("T", "hidden")), Tensor("residual", ("T", "hidden"), "float32")),
        reference=f"{_COMP}:latent_attention_block",
        composite=True,
        weights=("down", "q", "kv_b", "o"),
        state=True,
    ),
)
