"""Schemas of the built-in ops. Torch-free: the meaning stands in ``evener.ops.reference`` and
``evener.ops.composites``.

In shapes, ``T`` is the step's token count and ``R`` the number of output rows; both are dynamic. Upper-case names are
static sizes.
"""

from __future__ import annotations

from evener.contracts.ops import OpSchema, Tensor
from evener.ops.hybrid_schemas import HYBRID_COMPOSITES, HYBRID_PRIMITIVES
from evener.ops.latent_schemas import LATENT_COMPOSITES, LATENT_PRIMITIVES

_REF = "evener.ops.reference"
_COMP = "evener.ops.composites"
_CASES = "evener.testing.op_cases"
_HIDDEN = {"hidden": "H, width of the rows", "dtype": "compute type"}
_NORM = {**_HIDDEN, "eps": "added to the mean square", "offset": "added to the weight (Gemma: 1.0)"}
_ATTENTION_IN = {
    **_NORM,
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "head_dim": "D of queries and keys",
    "value_dim": "D of values",
    "rotary_dim": "leading part of each head that is rotated",
    "interleaved": "rotate pairs (2i, 2i+1) instead of halves",
    "qk_norm": "normalise each query and key head before rotating",
    "state": "the layer's StateSlot",
    "qkv": "the declared LinearWeight of q, k, v",
}
_MLP = {**_NORM, "inner": "width between the two linears", "activation": "silu, gelu or gelu_tanh",
        "gate_up": "the declared LinearWeight of gate and up", "down": "the declared LinearWeight of down"}  # fmt: skip
_ROUTE = {
    "experts": "E",
    "top": "experts a token",
    "scoring": "softmax, sigmoid, or softmax_top: of the logits, and softmax over the chosen ones",
    "groups": "equal groups of neighbouring experts; 1 = none",
    "top_groups": "groups a token",
    "group_best": "how many of a group's scores count for it",
    "renormalize": "weights sum to 1",
    "scale": "factor on the weights",
}

PRIMITIVES: tuple[OpSchema, ...] = (
    OpSchema(
        name="embedding",
        doc="Row ``ids[t]`` of the table, times ``scale`` (rounded to the compute type).",
        static={**_HIDDEN, "vocab": "V, rows of the table", "scale": "factor on the rows"},
        inputs=(Tensor("ids", ("T",), "int32"), Tensor("table", ("vocab", "hidden"))),
        outputs=(Tensor("rows", ("T", "hidden")),),
        reference=f"{_REF}.basic:embedding",
        cases=f"{_CASES}:embedding",
    ),
    OpSchema(
        name="rms_norm",
        doc="x / sqrt(mean(x²) + eps) * (weight + offset), in float32 (Zhang and Sennrich 2019).",
        static=_NORM,
        inputs=(Tensor("x", ("…", "hidden")), Tensor("weight", ("hidden",))),
        outputs=(Tensor("y", ("…", "hidden")),),
        reference=f"{_REF}.norm:rms_norm",
        cases=f"{_CASES}:rms_norm",
    ),
    OpSchema(
        name="add_rms_norm",
        doc="s = x + residual, kept in float32; (rms_norm(s), s).",
        static=_NORM,
        inputs=(
            Tensor("x", ("T", "hidden"), donated=True),
            Tensor("residual", ("T", "hidden"), "float32", donated=True),
            Tensor("weight", ("hidden",)),
        ),
        outputs=(Tensor("y", ("T", "hidden")), Tensor("sum", ("T", "hidden"), "float32")),
        reference=f"{_REF}.norm:add_rms_norm",
        cases=f"{_CASES}:add_rms_norm",
    ),
    OpSchema(
        name="layer_norm",
        doc="(x - mean) / sqrt(variance + eps) * weight + bias, in float32 (Ba et al. 2016).",
        static={**_HIDDEN, "eps": "added to the variance"},
        inputs=(
            Tensor("x", ("T", "hidden")),
            Tensor("weight", ("hidden",)),
            Tensor("bias", ("hidden",), optional=True),
        ),
        outputs=(Tensor("y", ("T", "hidden")),),
        reference=f"{_REF}.norm:layer_norm",
        cases=f"{_CASES}:layer_norm",
    ),
    OpSchema(
        name="linear",
        doc="x @ weightᵀ + bias; the parts of a packed weight are stacked along the out-features.",
        static={
            "weight": "the declared LinearWeight",
            "columns": "in-features",
            "rows": "out-features",
            "dtype": "compute type",
            "out": "type of the result: the compute type, or float32 for sums that are not rounded",
        },
        inputs=(
            Tensor("x", ("T", "columns")),
            Tensor("weight", ("rows", "columns"), "packed"),
            Tensor("bias", ("rows",), optional=True),
        ),
        outputs=(Tensor("y", ("T", "rows"), "out"),),
        reference=f"{_REF}.linear:linear",
        weights=("weight",),
        cases=f"{_CASES}:linear",
    ),
    OpSchema(
        name="grouped_linear",
        doc="y[t, k] = x[t] @ weight[slots[t, k]]ᵀ + bias[slots[t, k]]: matrices of a stack, K for each row; slot -1 "
        "gives 0.",
        static={
            "weight": "the declared StackedWeight",
            "experts": "matrices in the stack",
            "columns": "in-features",
            "rows": "out-features of one matrix",
            "dtype": "compute type",
        },
        inputs=(
            Tensor("x", ("T", "columns")),
            Tensor("weight", ("experts", "rows", "columns"), "packed"),
            Tensor("slots", ("T", "K"), "int32"),
            Tensor("bias", ("experts", "rows"), optional=True),
        ),
        outputs=(Tensor("y", ("T", "K", "rows")),),
        reference=f"{_REF}.linear:grouped_linear",
        capturable=False,
        weights=("weight",),
        cases=f"{_CASES}:grouped_linear",
    ),
    OpSchema(
        name="rotary",
        doc="Rotate the first ``rotary_dim`` of each head of query and key by position, in float32 (Su et al. 2021).",
        static={
            "head_dim": "D",
            "rotary_dim": "leading part that is rotated",
            "interleaved": "pairs (2i, 2i+1), not halves",
            "dtype": "compute type",
        },
        inputs=(
            Tensor("positions", ("T",), "int32"),
            Tensor("query", ("T", "heads", "head_dim"), donated=True),
            Tensor("key", ("T", "kv_heads", "head_dim"), donated=True),
            Tensor("cos_sin", ("positions", "rotary_dim"), "float32"),
        ),
        outputs=(Tensor("query", ("T", "heads", "head_dim")), Tensor("key", ("T", "kv_heads", "head_dim"))),
        reference=f"{_REF}.rotary:rotary",
        cases=f"{_CASES}:rotary",
    ),
    OpSchema(
        name="act_and_mul",
        doc="act(x[:, :inner]) * x[:, inner:] (Shazeer 2020). clamped_swiglu is another function, of pairs "
        "g = min(x[:, 0::2], limit) and u = x[:, 1::2]: g * sigmoid(alpha * g) * (clamp(u, -limit, limit) + 1).",
        static={
            "inner": "width of the result",
            "activation": "silu, gelu, gelu_tanh or clamped_swiglu",
            "dtype": "compute type",
            "alpha": "of clamped_swiglu",
            "limit": "of clamped_swiglu",
        },
        inputs=(Tensor("x", ("T", "2*inner")),),
        outputs=(Tensor("y", ("T", "inner")),),
        reference=f"{_REF}.basic:act_and_mul",
        cases=f"{_CASES}:act_and_mul",
    ),
    OpSchema(
        name="take_rows",
        doc="x[rows].",
        static=_HIDDEN,
        inputs=(Tensor("x", ("T", "hidden")), Tensor("rows", ("R",), "int64")),
        outputs=(Tensor("y", ("R", "hidden")),),
        reference=f"{_REF}.basic:take_rows",
        cases=f"{_CASES}:take_rows",
    ),
    OpSchema(
        name="softcap",
        doc="cap * tanh(x / cap), in float32.",
        static={"cap": "the bound", "dtype": "compute type"},
        inputs=(Tensor("x", ("R", "V")),),
        outputs=(Tensor("y", ("R", "V")),),
        reference=f"{_REF}.basic:softcap",
        cases=f"{_CASES}:softcap",
    ),
    OpSchema(
        name="route",
        doc="The ``top`` experts of each row with the highest score + bias, and their scores as weights. With groups "
        "only the ``top_groups`` groups whose ``group_best`` best add up to most take part. The lowest id wins ties.",
        static=_ROUTE,
        inputs=(Tensor("logits", ("T", "experts"), "float32"), Tensor("bias", ("experts",), "float32", optional=True)),
        outputs=(Tensor("ids", ("T", "top"), "int32"), Tensor("weights", ("T", "top"), "float32")),
        reference=f"{_REF}.experts:route",
        cases=f"{_CASES}:route",
    ),
    OpSchema(
        name="place_experts",
        doc="Where experts are: slots[id, token mod copies[id]], which spreads tokens over copies; -1 is not here.",
        static={"experts": "E, logical experts"},
        inputs=(
            Tensor("ids", ("T", "top"), "int32"),
            Tensor("slots", ("experts", "copies"), "int32"),
            Tensor("copies", ("experts",), "int32"),
        ),
        outputs=(Tensor("slots", ("T", "top"), "int32"),),
        reference=f"{_REF}.experts:place_experts",
        cases=f"{_CASES}:place_experts",
    ),
    OpSchema(
        name="mix_experts",
        doc="y[t] = Σ_k weights[t, k] · x[t, k], in float32.",
        static=_HIDDEN,
        inputs=(Tensor("x", ("T", "K", "hidden")), Tensor("weights", ("T", "K"), "float32")),
        outputs=(Tensor("y", ("T", "hidden")),),
        reference=f"{_REF}.experts:mix_experts",
        cases=f"{_CASES}:mix_experts",
    ),
    OpSchema(
        name="greedy",
        doc="The id of the largest logit of each row; ties go to the lowest id.",
        static={"vocab": "V"},
        inputs=(Tensor("logits", ("R", "vocab")),),
        outputs=(Tensor("ids", ("R",), "int32"),),
        reference=f"{_REF}.sampling:greedy",
        cases=f"{_CASES}:greedy",
    ),
    OpSchema(
        name="sample",
        doc="One id a row by temperature, top-k, top-p and min-p, with Gumbel noise from (seed, position, id).",
        static={"vocab": "V", "filters": "False if every row has top_k 0, top_p 1 and min_p 0"},
        inputs=(
            Tensor("logits", ("R", "vocab")),
            Tensor("temperature", ("R",), "float32"),
            Tensor("top_k", ("R",), "int32"),
            Tensor("top_p", ("R",), "float32"),
            Tensor("min_p", ("R",), "float32"),
            Tensor("seed", ("R",), "int32"),
            Tensor("position", ("R",), "int32"),
        ),
        outputs=(Tensor("ids", ("R",), "int32"),),
        reference=f"{_REF}.sampling:sample",
        cases=f"{_CASES}:sample",
    ),
    OpSchema(
        name="apply_mask",
        doc="Logits of ids whose bit in the packed mask is 0 become -inf.",
        static={"vocab": "V"},
        inputs=(Tensor("logits", ("R", "vocab"), donated=True), Tensor("mask", ("R", "ceil(vocab/32)"), "int32")),
        outputs=(Tensor("logits", ("R", "vocab")),),
        reference=f"{_REF}.sampling:apply_mask",
        cases=f"{_CASES}:apply_mask",
    ),
    OpSchema(
        name="logprobs",
        doc="Log-softmax in float32: the value at ``ids``, then the ``top`` largest with their ids.",
        static={"vocab": "V"},
        inputs=(Tensor("logits", ("R", "vocab")), Tensor("ids", ("R",), "int32"), Tensor("top", (), "int")),
        outputs=(
            Tensor("chosen", ("R",), "float32"),
            Tensor("values", ("R", "top"), "float32"),
            Tensor("top_ids", ("R", "top"), "int32"),
        ),
        reference=f"{_REF}.sampling:logprobs",
        cases=f"{_CASES}:logprobs",
    ),
)

COMPOSITES: tuple[OpSchema, ...] = (
    OpSchema(
        name="norm_qkv_rotary_write",
        doc="(add +) norm, QKV projection, head norms, rotary, write of keys and values; returns query and stream.",
        static=_ATTENTION_IN,
        inputs=(
            Tensor("x", ("T", "hidden"), donated=True),
            Tensor("residual", ("T", "hidden"), "float32", donated=True, optional=True),
            Tensor("positions", ("T",), "int32"),
            Tensor("norm", ("hidden",)),
            Tensor("qkv", ("rows", "hidden"), "packed"),
            Tensor("qkv_bias", ("rows",), optional=True),
            Tensor("q_norm", ("head_dim",), optional=True),
            Tensor("k_norm", ("head_dim",), optional=True),
            Tensor("cos_sin", ("positions", "rotary_dim"), "float32"),
            Tensor("views", (), "state"),
            Tensor("meta", (), "state"),
        ),
        outputs=(Tensor("query", ("T", "heads", "head_dim")), Tensor("residual", ("T", "hidden"), "float32")),
        reference=f"{_COMP}:norm_qkv_rotary_write",
        composite=True,
        weights=("qkv",),
        state=True,
    ),
    OpSchema(
        name="attention_block",
        doc="norm_qkv_rotary_write, attention, output projection, (post-norm).",
        static={
            **_ATTENTION_IN,
            "o": "the declared LinearWeight of the output projection",
            "post_norm": "norm after it",
        },
        inputs=(
            Tensor("x", ("T", "hidden"), donated=True),
            Tensor("residual", ("T", "hidden"), "float32", donated=True, optional=True),
            Tensor("positions", ("T",), "int32"),
            Tensor("weights", (), "AttentionWeights"),
            Tensor("views", (), "state"),
            Tensor("meta", (), "state"),
        ),
        outputs=(Tensor("x", ("T", "hidden")), Tensor("residual", ("T", "hidden"), "float32")),
        reference=f"{_COMP}:attention_block",
        composite=True,
        weights=("qkv", "o"),
        state=True,
    ),
    OpSchema(
        name="mlp_block",
        doc="add + norm, gate and up projection, activation, down projection, (post-norm).",
        static={**_MLP, "post_norm": "norm after the down projection"},
        inputs=(
            Tensor("x", ("T", "hidden"), donated=True),
            Tensor("residual", ("T", "hidden"), "float32", donated=True),
            Tensor("weights", (), "MLPWeights"),
        ),
        outputs=(Tensor("x", ("T", "hidden")), Tensor("residual", ("T", "hidden"), "float32")),
        reference=f"{_COMP}:mlp_block",
        composite=True,
        weights=("gate_up", "down"),
    ),
    OpSchema(
        name="moe_block",
        doc="add + norm, router in float32, route, place_experts, gate and up projections of the chosen experts, "
        "activation, down projections, mix_experts, (+ shared experts), (post-norm).",
        static={
            **_NORM,
            **_ROUTE,
            "inner": "width between the two linears of an expert",
            "activation": "as act_and_mul has them",
            "alpha": "of clamped_swiglu",
            "limit": "of clamped_swiglu",
            "weigh_input": "weights are factors on the experts' inputs, not on their results",
            "router": "the declared LinearWeight of the router, out float32",
            "gate_up": "the declared StackedWeight of gate and up",
            "down": "the declared StackedWeight of down",
            "shared_inner": "width of the shared experts together; 0 = none",
            "shared_gate_up": "their declared LinearWeight or None",
            "shared_down": "their declared LinearWeight or None",
            "shared_gate": "the declared LinearWeight of the gate on them (sigmoid) or None",
            "post_norm": "norm after the sum",
        },
        inputs=(
            Tensor("x", ("T", "hidden"), donated=True),
            Tensor("residual", ("T", "hidden"), "float32", donated=True),
            Tensor("weights", (), "MoEWeights"),
        ),
        outputs=(Tensor("x", ("T", "hidden")), Tensor("residual", ("T", "hidden"), "float32")),
        reference="evener.ops.expert_composites:moe_block",
        composite=True,
        weights=("router", "gate_up", "down", "shared_gate_up", "shared_down", "shared_gate"),
    ),
    OpSchema(
        name="decoder_layer",
        doc="attention_block, then mlp_block.",
        static={"attention": "static of the attention_block", "mlp": "static of the mlp_block", **_HIDDEN},
        inputs=(
            Tensor("x", ("T", "hidden"), donated=True),
            Tensor("residual", ("T", "hidden"), "float32", donated=True, optional=True),
            Tensor("positions", ("T",), "int32"),
            Tensor("attention", (), "AttentionWeights"),
            Tensor("mlp", (), "MLPWeights"),
            Tensor("views", (), "state"),
            Tensor("meta", (), "state"),
        ),
        outputs=(Tensor("x", ("T", "hidden")), Tensor("residual", ("T", "hidden"), "float32")),
        reference=f"{_COMP}:decoder_layer",
        composite=True,
        weights=("qkv", "o", "gate_up", "down"),
        state=True,
    ),
    OpSchema(
        name="head",
        doc="Norm of the picked rows of the stream, projection to the vocabulary, (soft cap); in float32 at both ends.",
        static={**_NORM, "vocab": "V", "weight": "the declared LinearWeight of the head", "cap": "soft cap or None"},
        inputs=(
            Tensor("x", ("R", "hidden"), "float32", donated=True),
            Tensor("norm", ("hidden",), "float32"),
            Tensor("weight", ("vocab", "hidden"), "packed"),
            Tensor("bias", ("vocab",), optional=True),
        ),
        outputs=(Tensor("logits", ("R", "vocab"), "float32"),),
        reference=f"{_COMP}:head",
        composite=True,
        weights=("weight",),
    ),
)

BUILTIN: tuple[OpSchema, ...] = (
    *PRIMITIVES, *LATENT_PRIMITIVES, *HYBRID_PRIMITIVES, *COMPOSITES, *LATENT_COMPOSITES, *HYBRID_COMPOSITES
)  # fmt: skip
