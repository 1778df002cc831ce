"""Schemas of hybrid models' ops. Torch-free."""

from __future__ import annotations

from evener.contracts.ops import OpSchema, tensors
from evener.ops.latent_schemas import BLOCK_NORM

_REF = "evener.ops.reference.recurrence"
_COMP = "evener.ops.hybrid"
_CASES = "evener.testing.conformance.cases.hybrid"
_STREAM = "x T,hidden donated; residual T,hidden float32 donated optional; "
_STATE = "; views - state; meta - state"
_OUT = "x T,hidden; residual T,hidden float32"
_NORM = {
    "norm": BLOCK_NORM, "hidden": "H, width of the rows", "dtype": "compute type", "eps": "added to the mean square",
    "offset": "added to the weights of norms", "state": "the layer's StateSlot",
    "o": "the declared LinearWeight of the output projection",
    "communicator": "of the ranks that share the heads, or None",
}  # fmt: skip

HYBRID_PRIMITIVES: tuple[OpSchema, ...] = (
    OpSchema(
        name="delta_gates", reference=f"{_REF}:delta_gates", cases=f"{_CASES}:delta_gates",
        doc="decay = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b), in float32.",
        static={"heads": "value heads", "dtype": "compute type"},
        inputs=tensors("a T,heads; b T,heads; a_log heads float32; dt_bias heads float32"),
        outputs=tensors("decay T,heads float32; beta T,heads float32"),
    ),
    OpSchema(
        name="gated_rms_norm", reference=f"{_REF}:gated_rms_norm", cases=f"{_CASES}:gated_rms_norm",
        doc="rms_norm(x) * weight * silu(gate), in float32.",
        static={"hidden": "D, width of the rows", "dtype": "compute type", "eps": "added to the mean square"},
        inputs=tensors("x …,hidden; gate …,hidden; weight hidden"),
        outputs=tensors("y …,hidden"),
    ),
)

HYBRID_COMPOSITES: tuple[OpSchema, ...] = (
    OpSchema(
        name="delta_block", reference=f"{_COMP}:delta_block", composite=True, weights=("enter", "o"), state=True,
        doc="(add +) norm, projection, gates, convolution and gated delta rule, gated norm, output projection, "
            "(all_reduce).",
        static={
            **_NORM, "heads": "value heads", "key_heads": "key heads", "key_dim": "of a key", "value_dim": "of a value",
            "enter": "the declared LinearWeight of queries, keys, values and gates",
        },
        inputs=tensors(_STREAM + "weights - DeltaWeights" + _STATE), outputs=tensors(_OUT),
    ),
    OpSchema(
        name="gated_attention_block", reference=f"{_COMP}:gated_attention_block", composite=True, state=True,
        weights=("qkv", "o"),
        doc="(add +) norm, QKV projection, head norms, rotary, write, attention, times sigmoid of a gate that lies"
        " beside each head's query, output projection, (all_reduce).",
        static={
            **_NORM, "heads": "query heads", "kv_heads": "key and value heads", "head_dim": "D",
            "rotary_dim": "leading part of each head that is rotated",
            "qkv": "the declared LinearWeight of queries with gates, keys, values",
        },
        inputs=tensors(_STREAM + "positions T int32; weights - GatedAttentionWeights" + _STATE), outputs=tensors(_OUT),
    ),
)  # fmt: skip
