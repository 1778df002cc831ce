"""Schemas of the built-in ops. Torch-free: the meaning stands in ``evener.ops.reference`` and
``evener.ops.composites``.

In shapes, ``T`` is the step's token count and ``R`` the number of output rows; both are dynamic. Upper-case names are
static sizes.
"""

from __future__ import annotations

from evener.contracts.ops import OpSchema, tensors
from evener.ops.hybrid_schemas import HYBRID_COMPOSITES, HYBRID_PRIMITIVES
from evener.ops.latent_schemas import BLOCK_NORM, LATENT_COMPOSITES, LATENT_PRIMITIVES
from evener.ops.rank_schemas import RANK_COMPOSITES, RANK_PRIMITIVES

_REF = "evener.ops.reference"
_COMP = "evener.ops.composites"
_CASES = "evener.testing.conformance.cases.basic"
_RANKS = {"communicator": "of the ranks that share the layer, whose results are summed, or None"}
_HIDDEN = {"hidden": "H, width of the rows", "dtype": "compute type"}
_NORM = {**_HIDDEN, "eps": "added to the mean square", "offset": "added to the weight (often 1.0)"}
_BLOCK = {**_NORM, "norm": BLOCK_NORM, "pre_norm": "False: no norm before the block"}
_ATTENTION_IN = {
    **_BLOCK, "heads": "query heads", "kv_heads": "key and value heads", "head_dim": "D of queries and keys",
    "value_dim": "D of values", "rotary_dim": "leading part of each head that is rotated; 0 = none",
    "interleaved": "rotate pairs (2i, 2i+1) instead of halves",
    "qk_norm": "normalise queries and keys before rotating",
    "qk_norm_over": "head: each head; each: each head, with weights of its own (layer norm); all: all heads together",
    "qk_norm_ranks": "the ranks that share all these heads, or None",
    "state": "the layer's StateSlot",
    "qkv": "the declared LinearWeight of q, k, v",
}  # fmt: skip
_ACTIVATION = "silu, gelu, gelu_tanh, relu or relu_squared"
_MLP = {**_BLOCK, "inner": "width between the two linears", "activation": _ACTIVATION,
        "gated": "False: activation(up) instead of activation(gate) * up",
        "gate_up": "the declared LinearWeight of gate and up, or of up alone",
        "down": "the declared LinearWeight of down"}  # fmt: skip
_ROUTE = {
    "experts": "E", "top": "experts a token",
    "scoring": "softmax, sigmoid, or softmax_top: of the logits, and softmax over the chosen ones",
    "groups": "equal groups of neighbouring experts; 1 = none", "top_groups": "groups a token",
    "group_best": "how many of a group's scores count for it", "renormalize": "weights sum to 1",
    "scale": "factor on the weights",
}  # fmt: skip

PRIMITIVES: tuple[OpSchema, ...] = (
    OpSchema(
        name="embedding", reference=f"{_REF}.basic:embedding", cases=f"{_CASES}:embedding",
        doc="Row ``ids[t]`` of the table, times ``scale`` (rounded to the compute type).",
        static={**_HIDDEN, "vocab": "V, rows of the table", "scale": "factor on the rows"},
        inputs=tensors("ids T int32; table vocab,hidden"), outputs=tensors("rows T,hidden"),
    ),
    OpSchema(
        name="rms_norm", reference=f"{_REF}.norm:rms_norm", cases=f"{_CASES}:rms_norm",
        doc="x / sqrt(mean(x²) + eps) * (weight + offset), in float32 (Zhang and Sennrich 2019).",
        static=_NORM, inputs=tensors("x …,hidden; weight hidden"), outputs=tensors("y …,hidden"),
    ),
    OpSchema(
        # The sum, its wide norm and the weight's product, beside each other.
        scratch=12.0,
        name="add_rms_norm", reference=f"{_REF}.norm:add_rms_norm", cases=f"{_CASES}:add_rms_norm",
        doc="s = x + residual, kept in float32; (rms_norm(s), s).",
        static=_NORM, inputs=tensors("x T,hidden donated; residual T,hidden float32 donated; weight hidden"),
        outputs=tensors("y T,hidden; sum T,hidden float32"),
    ),
    OpSchema(
        name="layer_norm", reference=f"{_REF}.norm:layer_norm", cases=f"{_CASES}:layer_norm",
        doc="(x - mean) / sqrt(variance + eps) * weight + bias, in float32 (Ba et al. 2016).",
        static={**_HIDDEN, "eps": "added to the variance"},
        inputs=tensors("x …,hidden; weight hidden optional; bias hidden optional"), outputs=tensors("y …,hidden"),
    ),
    OpSchema(
        name="linear", reference=f"{_REF}.linear:linear", weights=("weight",), cases=f"{_CASES}:linear",
        doc="x @ weightᵀ + bias; the parts of a packed weight are stacked along the out-features.",
        static={"weight": "the declared LinearWeight", "columns": "in-features", "rows": "out-features",
                "dtype": "compute type",
                "out": "type of the result: the compute type, or float32 for sums that are not rounded"},
        inputs=tensors("x T,columns; weight rows,columns packed; bias rows optional"), outputs=tensors("y T,rows out"),
    ),
    OpSchema(
        # One expert's rows and results at a time.
        scratch=2.0,
        name="grouped_linear", reference=f"{_REF}.linear:grouped_linear", capturable=False, weights=("weight",),
        cases=f"{_CASES}:grouped_linear",
        doc="y[t, k] = x[t] @ weight[slots[t, k]]ᵀ + bias[slots[t, k]]: matrices of a stack, K for each row; slot -1 "
            "gives 0.",
        static={"weight": "the declared StackedWeight", "experts": "matrices in the stack", "columns": "in-features",
                "rows": "out-features of one matrix", "dtype": "compute type"},
        inputs=tensors("x T,columns; weight experts,rows,columns packed; slots T,K int32; bias experts,rows optional"),
        outputs=tensors("y T,K,rows"),
    ),
    OpSchema(
        name="rotary", reference=f"{_REF}.rotary:rotary", cases=f"{_CASES}:rotary",
        doc="Rotate the first ``rotary_dim`` of each head of query and key by position, in float32 (Su et al. 2021).",
        static={"head_dim": "D", "rotary_dim": "leading part that is rotated",
                "interleaved": "pairs (2i, 2i+1), not halves", "dtype": "compute type"},
        inputs=tensors("positions T int32; query T,heads,head_dim donated; key T,kv_heads,head_dim donated; cos_sin "
                       "positions,rotary_dim float32"),
        outputs=tensors("query T,heads,head_dim; key T,kv_heads,head_dim"),
    ),
    OpSchema(
        scratch=0.0,
        name="act_and_mul", reference=f"{_REF}.basic:act_and_mul", cases=f"{_CASES}:act_and_mul",
        doc="act(x[:, :inner]) * x[:, inner:] (Shazeer 2020). clamped_swiglu is another function, of pairs g = "
            "min(x[:, 0::2], limit) and u = x[:, 1::2]: g * sigmoid(alpha * g) * (clamp(u, -limit, limit) + 1).",
        static={"inner": "width of the result", "activation": f"{_ACTIVATION}, or clamped_swiglu",
                "dtype": "compute type", "alpha": "of clamped_swiglu", "limit": "of clamped_swiglu"},
        inputs=tensors("x T,2*inner"), outputs=tensors("y T,inner"),
    ),
    OpSchema(
        name="activate", reference=f"{_REF}.basic:activate", cases=f"{_CASES}:activate",
        doc="act(x).",
        static={"inner": "width of the rows", "activation": _ACTIVATION, "dtype": "compute type"},
        inputs=tensors("x T,inner"), outputs=tensors("y T,inner"),
    ),
    OpSchema(
        name="take_rows", reference=f"{_REF}.basic:take_rows", cases=f"{_CASES}:take_rows",
        doc="x[rows].",
        static=_HIDDEN, inputs=tensors("x T,hidden; rows R int64"), outputs=tensors("y R,hidden"),
    ),
    OpSchema(
        name="softcap", reference=f"{_REF}.basic:softcap", cases=f"{_CASES}:softcap",
        doc="cap * tanh(x / cap), in float32.",
        static={"cap": "the bound", "dtype": "compute type"},
        inputs=tensors("x R,V"), outputs=tensors("y R,V"),
    ),
    OpSchema(
        name="route", reference=f"{_REF}.experts:route", cases=f"{_CASES}:route",
        doc="The ``top`` experts of each row with the highest score + bias, and their scores as weights. With groups "
            "only the ``top_groups`` groups whose ``group_best`` best add up to most take part. The lowest id wins "
            "ties.",
        # Scores, biased ones, their order and its ids of 8 bytes.
        static=_ROUTE, inputs=tensors("logits T,experts float32; bias experts float32 optional"), scratch=24.0,
        outputs=tensors("ids T,top int32; weights T,top float32"),
    ),
    OpSchema(
        name="place_experts", reference=f"{_REF}.experts:place_experts", cases=f"{_CASES}:place_experts",
        doc="Where experts are: slots[id, token mod copies[id]], which spreads tokens over copies; -1 is not here.",
        static={"experts": "E, logical experts"},
        inputs=tensors("ids T,top int32; slots experts,copies int32; copies experts int32"),
        outputs=tensors("slots T,top int32"),
    ),
    OpSchema(
        name="mix_experts", reference=f"{_REF}.experts:mix_experts", cases=f"{_CASES}:mix_experts",
        doc="y[t] = Σ_k weights[t, k] · x[t, k], in float32.",
        static=_HIDDEN, inputs=tensors("x T,K,hidden; weights T,K float32"), outputs=tensors("y T,hidden"), scratch=4.0,
    ),
    OpSchema(
        name="encode_attention", reference=f"{_REF}.basic:encode_attention", cases=f"{_CASES}:encode_attention",
        doc="softmax(scale * query @ keyᵀ) @ value for each head, all of S seen by every row: attention of an encoder, "
            "without state.",
        static={"heads": "heads", "head_dim": "D", "scale": "factor on the scores", "dtype": "compute type"},
        inputs=tensors("query T,heads,head_dim; key S,heads,head_dim; value S,heads,head_dim"),
        outputs=tensors("y T,heads,head_dim"),
        tolerance={"float32": (1e-4, 1e-4), "bfloat16": (1.6e-2, 1e-2), "float16": (2e-3, 2e-3)},
    ),
    OpSchema(
        name="greedy", reference=f"{_REF}.sampling:greedy", cases=f"{_CASES}:greedy",
        doc="The id of the largest logit of each row; ties go to the lowest id.",
        static={"vocab": "V"},
        inputs=tensors("logits R,vocab"), outputs=tensors("ids R int32"),
    ),
    OpSchema(
        # Sorted, with their ids, probabilities and noise.
        scratch=40.0,
        name="sample", reference=f"{_REF}.sampling:sample", cases=f"{_CASES}:sample",
        doc="One id a row by temperature, top-k, top-p and min-p, with Gumbel noise from (seed, position, id).",
        static={"vocab": "V", "filters": "False if every row has top_k 0, top_p 1 and min_p 0"},
        inputs=tensors("logits R,vocab; temperature R float32; top_k R int32; top_p R float32; min_p R float32; seed R "
                       "int32; position R int32"),
        outputs=tensors("ids R int32"),
    ),
    OpSchema(
        name="add_bias", reference=f"{_REF}.sampling:add_bias", cases=f"{_CASES}:add_bias",
        doc="logits[r, ids[r, k]] += values[r, k] wherever position[r] < until[r, k]; ``until`` 0 is an empty entry.",
        static={"vocab": "V"},
        inputs=tensors("logits R,vocab float32 donated; ids R,K int32; values R,K float32; until R,K int32; position R "
                       "int32"),
        outputs=tensors("logits R,vocab float32"),
    ),
    OpSchema(
        name="penalize", reference=f"{_REF}.sampling:penalize", cases=f"{_CASES}:penalize",
        doc="Penalties by what stands in tokens[slot, :length]. The logit x of every id there becomes x / repetition "
            "if x > 0, else x * repetition (Keskar et al. 2019); then those of ids that stand ``count`` times from "
            "``prompt`` on lose frequency * count, and presence. ``longest``: no length is larger.",
        static={"vocab": "V"},
        inputs=tensors("logits R,vocab float32 donated; tokens slots,columns int32; slots R int32; prompt R int32; "
                       "lengths R int32; longest - int; repetition R float32; frequency R float32; presence R float32"),
        outputs=tensors("logits R,vocab float32"),
    ),
    OpSchema(
        name="apply_mask", reference=f"{_REF}.sampling:apply_mask", cases=f"{_CASES}:apply_mask",
        doc="Logits of ids whose bit in the packed mask is 0 become -inf.",
        static={"vocab": "V"},
        inputs=tensors("logits R,vocab donated; mask R,ceil(vocab/32) int32"), outputs=tensors("logits R,vocab"),
    ),
    OpSchema(
        name="logprobs", reference=f"{_REF}.sampling:logprobs", cases=f"{_CASES}:logprobs",
        doc="Log-softmax in float32: the value at ``ids``, then the ``top`` largest with their ids.",
        static={"vocab": "V"},
        inputs=tensors("logits R,vocab; ids R int32; top - int"),
        outputs=tensors("chosen R float32; values R,top float32; top_ids R,top int32"),
    ),
)  # fmt: skip

COMPOSITES: tuple[OpSchema, ...] = (
    OpSchema(
        name="norm_qkv_rotary_write", reference=f"{_COMP}:norm_qkv_rotary_write", composite=True, weights=("qkv",),
        state=True,
        doc="(add +) norm, QKV projection, head norms, rotary, write of keys and values; returns query and stream.",
        static=_ATTENTION_IN,
        inputs=tensors("x T,hidden donated; residual T,hidden float32 donated optional; positions T int32; norm "
                       "hidden optional; qkv rows,hidden packed; qkv_bias rows optional; q_norm head_dim optional; "
                       "k_norm head_dim optional; cos_sin positions,rotary_dim float32; views - state; meta - state"),
        outputs=tensors("query T,heads,head_dim; residual T,hidden float32"),
    ),
    OpSchema(
        name="attention_block", reference=f"{_COMP}:attention_block", composite=True, weights=("qkv", "o"), state=True,
        doc="norm_qkv_rotary_write, (factors on queries by position,) attention, output projection, (all_reduce,) "
            "(post-norm).",
        static={**_ATTENTION_IN, **_RANKS, "o": "the declared LinearWeight of the output projection",
                "post_norm": "norm after it", "query_scale": "whether queries have factors by position"},
        inputs=tensors("x T,hidden donated; residual T,hidden float32 donated optional; positions T int32; weights - "
                       "AttentionWeights; views - state; meta - state"),
        outputs=tensors("x T,hidden; residual T,hidden float32"),
    ),
    OpSchema(
        name="mlp_block", reference=f"{_COMP}:mlp_block", composite=True, weights=("gate_up", "down"),
        doc="add + norm, gate and up projection, activation, down projection, (all_reduce,) (post-norm).",
        static={**_MLP, **_RANKS, "post_norm": "norm after it"},
        inputs=tensors("x T,hidden donated; residual T,hidden float32 donated; weights - MLPWeights"),
        outputs=tensors("x T,hidden; residual T,hidden float32"),
    ),
    OpSchema(
        name="moe_block", reference="evener.ops.expert_composites:moe_block", composite=True,
        weights=("router", "gate_up", "down", "shared_gate_up", "shared_down", "shared_gate"),
        doc="add + norm, router in float32, route, place_experts, gate and up projections of the chosen experts, "
            "activation, down projections, mix_experts, (+ shared experts), (all_reduce,) (post-norm).",
        static={**_BLOCK, **_ROUTE, **_RANKS, "inner": "width between the two linears of an expert",
        "post_norm": "norm after it",
        "activation": "as act_and_mul has them", "alpha": "of clamped_swiglu", "limit": "of clamped_swiglu",
        "weigh_input": "weights are factors on the experts' inputs, not on their results",
        "router": "the declared LinearWeight of the router, out float32",
        "gate_up": "the declared StackedWeight of gate and up", "down": "the declared StackedWeight of down",
        "shared_inner": "width of the shared experts together; 0 = none",
        "shared_gate_up": "their declared LinearWeight or None", "shared_down": "their declared LinearWeight or None",
        "shared_gate": "the declared LinearWeight of the gate on them (sigmoid) or None"},
        inputs=tensors("x T,hidden donated; residual T,hidden float32 donated; weights - MoEWeights"),
        outputs=tensors("x T,hidden; residual T,hidden float32"),
    ),
    OpSchema(
        name="decoder_layer", reference=f"{_COMP}:decoder_layer", composite=True,
        weights=("qkv", "o", "gate_up", "down"), state=True,
        doc="attention_block, then mlp_block; parallel: of the same stream, and their results are added up.",
        static={"attention": "static of the attention_block", "mlp": "static of the mlp_block", **_HIDDEN,
                "parallel": "whether both halves read the same stream"},
        inputs=tensors("x T,hidden donated; residual T,hidden float32 donated optional; positions T int32; attention - "
                       "AttentionWeights; mlp - MLPWeights; views - state; meta - state"),
        outputs=tensors("x T,hidden; residual T,hidden float32"),
    ),
    OpSchema(
        name="head", reference=f"{_COMP}:head", composite=True, weights=("weight",),
        doc="Norm of the picked rows of the stream, projection to the vocabulary, (factor,) (soft cap,) (all_gather); "
            "in float32 at both ends.",
        static={**_BLOCK, "vocab": "V", "weight": "the declared LinearWeight of the head",
                "logit_scale": "factor on the logits", "cap": "soft cap or None",
                "communicator": "of the ranks that share the vocabulary, or None"},
        inputs=tensors("x R,hidden float32 donated; norm hidden float32 optional; weight vocab,hidden packed; bias "
                       "vocab optional"),
        outputs=tensors("logits R,vocab float32"),
    ),
)  # fmt: skip

BUILTIN: tuple[OpSchema, ...] = (
    *PRIMITIVES, *LATENT_PRIMITIVES, *HYBRID_PRIMITIVES, *RANK_PRIMITIVES,
    *COMPOSITES, *LATENT_COMPOSITES, *HYBRID_COMPOSITES, *RANK_COMPOSITES,
)  # fmt: skip
