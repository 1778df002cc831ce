"""Schemas of the built-in ops. Torch-free: the references are in ``evener.ops.reference`` and, of composite ops, in the
other modules of ``evener.ops``.

In shapes, ``T`` is the number of tokens in the step and ``R`` the number of output rows; both are dynamic. Other
upper-case names in texts are static sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.contracts import statics
from evener.contracts.ops import OpSchema, tensors
from evener.contracts.statics import describe

_HIDDEN = {"hidden": "H, width of the rows", "dtype": "compute dtype"}
_NORM = {**_HIDDEN, "eps": "added to the mean square", "offset": "added to the weight (often 1.0)"}
_RANKS = {"communicator": "the ranks that share the layer"}
_ACTIVATION = "silu, gelu, gelu_tanh, relu or relu_squared"
_STREAM = "x T,hidden donated; residual T,hidden float32 donated optional"
_STATE = "views - state; meta - state"
_HEAD = "x R,hidden float32 donated; norm hidden float32 optional; weight vocab,hidden packed; bias vocab optional"


def _primitive(
    reference: str, doc: str, *, static: Mapping[str, str], inputs: str, outputs: str, **rest: Any
) -> OpSchema:
    """The schema of the op that the function ``reference`` below ``evener.ops`` defines; both have the same name."""
    return OpSchema(
        name=reference.partition(":")[2], reference=f"evener.ops.{reference}", doc=doc, static=static,
        inputs=tensors(inputs), outputs=tensors(outputs), **rest,
    )  # fmt: skip


def _composite(
    reference: str, record: type, doc: str, *, inputs: str, outputs: str = "x T,hidden; residual T,hidden float32",
    weights: tuple[str, ...] = (),
) -> OpSchema:  # fmt: skip
    """The same for a composite op, whose static parameters are ``record``."""
    return _primitive(
        reference, doc, static=describe(record), inputs=inputs, outputs=outputs, composite=True, weights=weights,
        state=" - state" in inputs,
    )  # fmt: skip


PRIMITIVES: tuple[OpSchema, ...] = (
    _primitive(
        "reference.basic:embedding",
        "Row ``ids[t]`` of the table, times ``scale``, which is rounded to the compute dtype.",
        static={**_HIDDEN, "vocab": "V, rows of the table", "scale": "factor", "weight": "of a packed table"},
        inputs="ids T int32; table vocab,hidden", outputs="rows T,hidden", weights=("weight",),
    ),
    _primitive(
        "reference.norm:rms_norm",
        "x / sqrt(mean(x²) + eps) * (weight + offset), in float32 (Zhang and Sennrich 2019).",
        static=_NORM, inputs="x …,hidden; weight hidden", outputs="y …,hidden",
    ),
    # Scratch: the sum, its norm in float32, and the product with the weight exist at the same time.
    _primitive(
        "reference.norm:add_rms_norm", "s = x + residual, kept in float32; (rms_norm(s), s).",
        static=_NORM, inputs="x T,hidden donated; residual T,hidden float32 donated; weight hidden",
        outputs="y T,hidden; sum T,hidden float32", scratch=12.0,
    ),
    _primitive(
        "reference.norm:layer_norm", "(x - mean) / sqrt(variance + eps) * weight + bias, in float32 (Ba et al. 2016).",
        static={**_HIDDEN, "eps": "added to the variance"},
        inputs="x …,hidden; weight hidden optional; bias hidden optional", outputs="y …,hidden",
    ),
    _primitive(
        "reference.linear:linear",
        "x @ weightᵀ + bias; the parts of a packed weight are concatenated along the out-features.",
        static={"weight": "the declared LinearWeight", "columns": "in-features", "rows": "out-features",
                "dtype": "compute dtype",
                "out": "dtype of the result: the compute dtype, or float32 for a result that is not rounded"},
        inputs="x T,columns; weight rows,columns packed; bias rows optional", outputs="y T,rows out",
        weights=("weight",),
    ),
    # Scratch: one expert's rows and results at a time.
    _primitive(
        "reference.linear:grouped_linear",
        "y[t, k] = x[t] @ weight[slots[t, k]]ᵀ + bias[slots[t, k]]: K matrices of a stack for each row; slot -1 "
        "gives 0.",
        static={"weight": "the declared StackedWeight", "experts": "matrices in the stack", "columns": "in-features",
                "rows": "out-features of one matrix", "dtype": "compute dtype"},
        inputs="x T,columns; weight experts,rows,columns packed; slots T,K int32; bias experts,rows optional",
        outputs="y T,K,rows", scratch=2.0, capturable=False, weights=("weight",),
    ),
    _primitive(
        "reference.rotary:rotary",
        "Rotate the first ``rotary_dim`` of each head of query and key by position, in float32 (Su et al. 2021).",
        static={"head_dim": "D", "rotary_dim": "leading part that is rotated",
                "interleaved": "pairs (2i, 2i+1), not halves", "dtype": "compute dtype"},
        inputs="positions T int32; query T,heads,head_dim donated; key T,kv_heads,head_dim donated; cos_sin "
               "positions,rotary_dim float32",
        outputs="query T,heads,head_dim; key T,kv_heads,head_dim",
    ),
    _primitive(
        "reference.basic:act_and_mul",
        "act(x[:, :inner]) * x[:, inner:] (Shazeer 2020). clamped_swiglu is another function, of pairs g = min(x[:, "
        "0::2], limit) and u = x[:, 1::2]: g * sigmoid(alpha * g) * (clamp(u, -limit, limit) + 1).",
        static={"inner": "width of the result", "activation": f"{_ACTIVATION}, or clamped_swiglu",
                "dtype": "compute dtype", "alpha": "of clamped_swiglu", "limit": "of clamped_swiglu"},
        inputs="x T,2*inner", outputs="y T,inner", scratch=0.0,
    ),
    _primitive(
        "reference.basic:activate", "act(x).",
        static={"inner": "width of the rows", "activation": _ACTIVATION, "dtype": "compute dtype"}, inputs="x T,inner",
        outputs="y T,inner",
    ),
    _primitive(
        "reference.basic:take_rows", "x[rows].",
        static=_HIDDEN, inputs="x T,hidden; rows R int64", outputs="y R,hidden",
    ),
    _primitive(
        "reference.basic:softcap", "cap * tanh(x / cap), in float32.",
        static={"cap": "the bound", "dtype": "compute dtype"}, inputs="x R,V", outputs="y R,V",
    ),
    # Scratch: scores, biased ones, their order and its ids of 8 bytes.
    _primitive(
        "reference.experts:route",
        "The ``top`` experts of each row with the highest score + bias; their scores are the weights. With groups, "
        "only experts of the ``top_groups`` best groups are chosen; a group's rank is the sum of its ``group_best`` "
        "highest scores. Of equal scores the lowest id is chosen.",
        static=describe(statics.RouteStatic), inputs="logits T,experts float32; bias experts float32 optional",
        outputs="ids T,top int32; weights T,top float32", scratch=24.0,
    ),
    _primitive(
        "reference.experts:place_experts",
        "slots[id, token mod copies[id]], which spreads tokens over an expert's copies; -1: not on this rank.",
        static={"experts": "E, logical experts"},
        inputs="ids T,top int32; slots experts,copies int32; copies experts int32", outputs="slots T,top int32",
    ),
    _primitive(
        "reference.experts:mix_experts", "y[t] = Σ_k weights[t, k] · x[t, k], in float32.",
        static=_HIDDEN, inputs="x T,K,hidden; weights T,K float32", outputs="y T,hidden", scratch=4.0,
    ),
    _primitive(
        "reference.basic:encode_attention",
        "softmax(scale * query @ keyᵀ) @ value for each head, without mask and without state: attention of an encoder.",
        static={"heads": "heads", "head_dim": "D", "scale": "factor on the scores", "dtype": "compute dtype"},
        inputs="query T,heads,head_dim; key S,heads,head_dim; value S,heads,head_dim", outputs="y T,heads,head_dim",
        tolerance={"float32": (1e-4, 1e-4), "bfloat16": (1.6e-2, 1e-2), "float16": (2e-3, 2e-3)},
    ),
    _primitive(
        "reference.sampling:greedy", "The id of the largest logit of each row; ties go to the lowest id.",
        static={"vocab": "V"}, inputs="logits R,vocab", outputs="ids R int32",
    ),
    # Scratch: sorted logits, their ids, probabilities and noise.
    _primitive(
        "reference.sampling:sample",
        "One id per row by temperature, top-k, top-p and min-p, with Gumbel noise from (seed, position, id).",
        static={"vocab": "V", "filters": "False if every row has top_k 0, top_p 1 and min_p 0"},
        inputs="logits R,vocab; temperature R float32; top_k R int32; top_p R float32; min_p R float32; seed R int32; "
               "position R int32",
        outputs="ids R int32", scratch=40.0,
    ),
    _primitive(
        "reference.sampling:add_bias",
        "logits[r, ids[r, k]] += values[r, k] if position[r] < until[r, k]; an entry with ``until`` 0 is empty.",
        static={"vocab": "V"},
        inputs="logits R,vocab float32 donated; ids R,K int32; values R,K float32; until R,K int32; position R int32",
        outputs="logits R,vocab float32",
    ),
    _primitive(
        "reference.sampling:penalize",
        "Penalties for the ids in tokens[slot, :length]. Their logit x becomes x / repetition if x > 0, else x * "
        "repetition (Keskar et al. 2019). Then frequency * count + presence is subtracted from the logit of each id "
        "that occurs ``count`` > 0 times after the first ``prompt`` tokens. ``longest``: the largest length.",
        static={"vocab": "V"},
        inputs="logits R,vocab float32 donated; tokens slots,columns int32; slots R int32; prompt R int32; lengths R "
               "int32; longest - int; repetition R float32; frequency R float32; presence R float32",
        outputs="logits R,vocab float32",
    ),
    _primitive(
        "reference.sampling:apply_mask", "Logits of ids whose bit in the packed mask is 0 become -inf.",
        static={"vocab": "V"}, inputs="logits R,vocab donated; mask R,ceil(vocab/32) int32", outputs="logits R,vocab",
    ),
    _primitive(
        "reference.sampling:logprobs",
        "Log-softmax in float32: the value at ``ids``, then the ``top`` largest with their ids.",
        static={"vocab": "V"}, inputs="logits R,vocab; ids R int32; top - int",
        outputs="chosen R float32; values R,top float32; top_ids R,top int32",
    ),
)  # fmt: skip

#: Of latent attention, of hybrid models, and of several ranks.
OTHER_PRIMITIVES: tuple[OpSchema, ...] = (
    _primitive(
        "reference.latent:head_linear",
        "y[t, h] = x[t, h] @ weight[h]ᵀ, or @ weight[h] where it is stored transposed: one matrix a head.",
        static={"heads": "matrices", "columns": "in-features", "rows": "out-features",
                "transposed": "whether weight is [heads, columns, rows] instead of [heads, rows, columns]",
                "dtype": "compute dtype"},
        inputs="x T,heads,columns; weight heads,rows,columns", outputs="y T,heads,rows",
    ),
    # Scratch: scores of all heads in float32, and their softmax.
    _primitive(
        "reference.latent:partial_attention",
        "Causal attention over a piece of one request's context, in float32, and the log of the sum of its weights; "
        "pieces are merged by the latter. Query t reads keys up to t + offset; where there are none, 0 and -inf.",
        static={"heads": "query, key and value heads", "scale": "factor on the scores", "dtype": "compute dtype"},
        inputs="query T,heads,head_dim; key S,heads,head_dim; value S,heads,value_dim; offset - int",
        outputs="out T,heads,value_dim float32; total T,heads float32", scratch=32.0,
    ),
    _primitive(
        "reference.recurrence:delta_gates", "decay = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b), in float32.",
        static={"heads": "value heads", "dtype": "compute dtype"},
        inputs="a T,heads; b T,heads; a_log heads float32; dt_bias heads float32",
        outputs="decay T,heads float32; beta T,heads float32",
    ),
    _primitive(
        "reference.recurrence:gated_rms_norm", "rms_norm(x) * weight * silu(gate), in float32.",
        static={"hidden": "D, width of the rows", "dtype": "compute dtype", "eps": "added to the mean square"},
        inputs="x …,hidden; gate …,hidden; weight hidden", outputs="y …,hidden",
    ),
    # Scratch: sums before and after an adapter, and its products, in float32.
    _primitive(
        "reference.adapters:add_adapters",
        "Row t of part p of y, + x[t] @ down[s, p]ᵀ @ up[s, rows of p]ᵀ with s = index[t]; nothing for -1. ``down[s, "
        "p]`` are the p-th ``rank`` rows of ``down[s]``. What other adapters hold, also infinity, changes no row.",
        static={"columns": "in-features", "rows": "out-features of all parts", "parts": "out-features of each part",
                "slots": "adapters that there are places for", "rank": "columns of up",
                "inner": "rows of down: parts * rank", "dtype": "compute dtype"},
        inputs="y T,rows donated; x T,columns; down slots,inner,columns; up slots,rows,rank; index T int32",
        outputs="y T,rows", scratch=16.0,
    ),
    # A run with one rank calls neither of these.
    _primitive(
        "reference.ranks:all_reduce", "The sum of x over all ranks, with the same bits on each rank.",
        static={**_RANKS, **_HIDDEN}, inputs="x T,hidden donated", outputs="y T,hidden",
    ),
    _primitive(
        "reference.ranks:all_gather",
        "The columns of all ranks, concatenated in rank order. Each rank has ``columns``; the last ranks may have "
        "fewer, so that the result has ``total``.",
        static={**_RANKS, "columns": "of the first rank", "total": "of all ranks", "dtype": "compute dtype"},
        inputs="x R,columns", outputs="y R,total",
    ),
)  # fmt: skip

COMPOSITES: tuple[OpSchema, ...] = (
    _composite(
        "composites:norm_qkv_rotary_write", statics.QKVStatic,
        "(add +) norm, QKV projection, head norms, rotary, write of keys and values; returns query and stream.",
        inputs=f"{_STREAM}; positions T int32; norm hidden optional; qkv rows,hidden packed; qkv_bias rows optional; "
               f"q_norm head_dim optional; k_norm head_dim optional; cos_sin positions,rotary_dim float32; {_STATE}",
        outputs="query T,heads,head_dim; residual T,hidden float32", weights=("qkv",),
    ),
    _composite(
        "composites:attention_block", statics.AttentionStatic,
        "norm_qkv_rotary_write, (factors on queries by position,) attention, output projection, (all_reduce,) "
        "(post-norm).",
        inputs=f"{_STREAM}; positions T int32; weights - AttentionWeights; {_STATE}",
        weights=("qkv", "o"),
    ),
    _composite(
        "composites:mlp_block", statics.MLPStatic,
        "add + norm, gate and up projection, activation, down projection, (all_reduce,) (post-norm).",
        inputs="x T,hidden donated; residual T,hidden float32 donated; weights - MLPWeights",
        weights=("gate_up", "down"),
    ),
    _composite(
        "composites:routed_experts", statics.ExpertsStatic,
        "place_experts, gate and up projections of the chosen experts, activation, down projections, mix_experts.",
        inputs="x T,hidden; ids T,top int32; weights T,top float32; experts - MoEWeights", outputs="y T,hidden",
        weights=("gate_up", "down"),
    ),
    _composite(
        "composites:moe_block", statics.MoEStatic,
        "add + norm, router in float32, route, routed_experts, (+ shared experts), (all_reduce,) (post-norm).",
        inputs="x T,hidden donated; residual T,hidden float32 donated; weights - MoEWeights",
        weights=("router", "gate_up", "down", "shared_gate_up", "shared_down", "shared_gate"),
    ),
    _composite(
        "composites:decoder_layer", statics.DecoderLayerStatic,
        "attention_block, then mlp_block; if parallel, both read the same stream and their results are added.",
        inputs=f"{_STREAM}; positions T int32; attention - AttentionWeights; mlp - MLPWeights; {_STATE}",
        weights=("qkv", "o", "gate_up", "down"),
    ),
    _composite(
        "composites:head", statics.HeadStatic,
        "Norm of output rows of the stream, projection to the vocabulary, (factor,) (soft cap,) (all_gather); input "
        "and result are float32.",
        inputs=_HEAD, outputs="logits R,vocab float32", weights=("weight",),
    ),
)  # fmt: skip

#: See ``OTHER_PRIMITIVES``.
OTHER_COMPOSITES: tuple[OpSchema, ...] = (
    _composite(
        "latent:latent_attend", statics.LatentAttendStatic,
        "Attention of queries over latent state that was written: by absorption for requests that add one token "
        "(unless absorb is none) and for sparse layers, otherwise by expansion.",
        inputs=f"query T,heads,head_dim; kv_b rows,rank packed; matrices rows,rank optional; {_STATE}; chosen T,top "
               "int32 optional",
        outputs="out T,heads,value_dim", weights=("kv_b",),
    ),
    _composite(
        "latent:index_block", statics.IndexStatic,
        "A sparse indexer (DeepSeek-AI 2025, DSA): queries from the queries' latent, one key a token, layer norm, "
        "rotary, write, selection of the tokens that attention reads.",
        inputs="latent T,q_rank; x T,hidden; positions T int32; weights - IndexWeights; views - state; meta - state",
        outputs="chosen T,top int32", weights=("q", "k", "weights"),
    ),
    _composite(
        "latent:latent_attention_block", statics.LatentStatic,
        "(add +) norm, down-projections, inner norms, queries, rotary, write, (index_block,) latent_attend, output "
        "projection, (all_reduce) (DeepSeek-AI 2024, MLA).",
        inputs=f"{_STREAM}; positions T int32; weights - LatentWeights; {_STATE}; index_weights - IndexWeights "
               "optional; index_views - state optional; index_meta - state optional",
        weights=("down", "q", "kv_b", "o"),
    ),
    _composite(
        "gated_delta:delta_block", statics.DeltaStatic,
        "(add +) norm, projection, gates, convolution and gated delta rule, gated norm, output projection, "
        "(all_reduce).",
        inputs=f"{_STREAM}; weights - DeltaWeights; {_STATE}", weights=("in_proj", "o"),
    ),
    _composite(
        "gated_delta:gated_attention_block", statics.GatedAttentionStatic,
        "(add +) norm, QKV projection, head norms, rotary, write, attention, times sigmoid of a gate, which is "
        "projected after each head's query, output projection, (all_reduce).",
        inputs=f"{_STREAM}; positions T int32; weights - GatedAttentionWeights; {_STATE}",
        weights=("qkv", "o"),
    ),
    _composite(
        "ranks:all_reduce_norm", statics.AllReduceNormStatic, "all_reduce, norm.",
        inputs="x T,hidden donated; weight hidden", outputs="y T,hidden",
    ),
    _composite(
        "ranks:vocab_embedding", statics.VocabEmbeddingStatic,
        "embedding of the ids whose rows this rank has, zeros for the others, all_reduce.",
        inputs="ids T int32; table rows,hidden", outputs="y T,hidden",
    ),
    _composite(
        "ranks:vocab_greedy", statics.HeadStatic,
        "The ids of the largest logits: head over this rank's rows of the vocabulary, greedy; over several ranks "
        "all_gather of the ranks' best, the best of these.",
        inputs=_HEAD, outputs="ids R int32", weights=("weight",),
    ),
)  # fmt: skip

BUILTIN: tuple[OpSchema, ...] = (*PRIMITIVES, *OTHER_PRIMITIVES, *COMPOSITES, *OTHER_COMPOSITES)
