"""Schemas of latent attention's ops. Torch-free."""

from __future__ import annotations

from evener.contracts.ops import OpSchema, tensors

#: What blocks say of the kind of their norms.
BLOCK_NORM = "rms, layer, biased_layer (weight and bias are one tensor) or bare_layer (neither)"
_REF = "evener.ops.reference.latent"
_COMP = "evener.ops.latent"
_CASES = "evener.testing.conformance.cases.latent"
_LATENT = {
    "heads": "query heads", "nope_dim": "part of a head's query and key that is not rotated",
    "value_dim": "width of a head's value", "rank": "width of the latent", "dtype": "compute type",
    "kv_b": "the declared LinearWeight that makes keys and values of latents",
    "absorb": "none, absorb-without-precomp or absorb", "sparse": "whether each query reads chosen tokens only",
    "state": "the layer's StateSlot",
}  # fmt: skip

LATENT_PRIMITIVES: tuple[OpSchema, ...] = (
    OpSchema(
        name="head_linear", reference=f"{_REF}:head_linear", cases=f"{_CASES}:head_linear",
        doc="y[t, h] = x[t, h] @ weight[h]ᵀ, or @ weight[h] where it is stored transposed: one matrix a head.",
        static={"heads": "matrices", "columns": "in-features", "rows": "out-features",
                "transposed": "whether weight is [heads, columns, rows] instead of [heads, rows, columns]",
                "dtype": "compute type"},
        inputs=tensors("x T,heads,columns; weight heads,rows,columns"), outputs=tensors("y T,heads,rows"),
    ),
    OpSchema(
        scratch=32.0,  # scores of all heads in float32, and their softmax
        name="partial_attention", reference=f"{_REF}:partial_attention", cases=f"{_CASES}:partial_attention",
        doc="Causal attention over a piece of one request's context, in float32, and the log of the sum of its "
            "weights; pieces are merged by the latter. Query t reads keys up to t + offset; where there are none, 0 "
            "and -inf.",
        static={"heads": "query, key and value heads", "scale": "factor on the scores", "dtype": "compute type"},
        inputs=tensors("query T,heads,head_dim; key S,heads,head_dim; value S,heads,value_dim; offset - int"),
        outputs=tensors("out T,heads,value_dim float32; total T,heads float32"),
    ),
)  # fmt: skip

LATENT_COMPOSITES: tuple[OpSchema, ...] = (
    OpSchema(
        name="latent_attend", reference=f"{_COMP}:latent_attend", composite=True, weights=("kv_b",), state=True,
        doc="Attention of whole queries over latent state that is written: by absorption for requests that add one "
            "token (unless absorb is none) and for sparse layers, by expansion for the rest.",
        static=_LATENT,
        inputs=tensors("query T,heads,head_dim; kv_b rows,rank packed; matrices rows,rank optional; views - state; "
                       "meta - state; chosen T,top int32 optional"),
        outputs=tensors("out T,heads,value_dim"),
    ),
    OpSchema(
        name="index_block", reference=f"{_COMP}:index_block", composite=True, weights=("q", "k", "weights"), state=True,
        doc="A sparse indexer (DeepSeek-AI 2025, DSA): queries from the queries' latent, one key a token, layer norm, "
            "rotary, write, selection of the tokens that attention reads.",
        static={"hidden": "H, width of the rows", "heads": "index heads", "head_dim": "D of queries and the key",
                "rope_dim": "leading part that is rotated", "dtype": "compute type", "state": "the index's StateSlot",
                "q": "the declared LinearWeight of the queries", "k": "of the key", "weights": "of the heads' weights"},
        inputs=tensors("latent T,q_rank; x T,hidden; positions T int32; weights - IndexWeights; views - state; meta - "
                       "state"),
        outputs=tensors("chosen T,top int32"),
    ),
    OpSchema(
        name="latent_attention_block", reference=f"{_COMP}:latent_attention_block", composite=True,
        weights=("down", "q", "kv_b", "o"), state=True,
        doc="(add +) norm, down-projections, inner norms, queries, rotary, write, (index_block,) latent_attend, output "
            "projection, (all_reduce) (DeepSeek-AI 2024, MLA).",
        static={**_LATENT, "norm": BLOCK_NORM, "communicator": "of the ranks that share the heads, or None",
                "hidden": "H, width of the rows", "eps": "added to the mean square by the first norm",
                "offset": "added to the first norm's weight",
                "rope_dim": "rotated part of a head's query, and of the key that all heads share",
                "q_rank": "width of the queries' latent; None makes queries directly",
                "interleaved": "rotate pairs (2i, 2i+1) instead of halves",
                "down": "the declared LinearWeight of (queries or their latent), latent and rotated key",
                "q": "of the queries, where there is a latent", "o": "of the output projection",
                "index": "static of the index_block, or None"},
        inputs=tensors("x T,hidden donated; residual T,hidden float32 donated optional; positions T int32; weights - "
                       "LatentWeights; views - state; meta - state; index_weights - IndexWeights optional; index_views "
                       "- state optional; index_meta - state optional"),
        outputs=tensors("x T,hidden; residual T,hidden float32"),
    ),
)  # fmt: skip
