"""What the composites mean: expansions into other ops. Each function takes ``(static, use)`` and returns the callable.

``use`` gives whatever resolution chose for the parts, so a faster primitive serves inside an expanded composite, and a
kernel for the composite replaces all of them, without an edit in any model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from evener.contracts.ops import OpFunction, Use
from evener.ops.norms import Static, add_norm, any_norm, first_norm, head_norm
from evener.ops.ranks import summed, vocab_head

if TYPE_CHECKING:
    import torch

    from evener.contracts.quant import PackedWeight
    from evener.layers.declared import LinearWeight


class AttentionWeights(NamedTuple):
    """What an ``attention_block`` needs beside its inputs; None where the model has no such weight.

    Attributes:
        norm: [hidden], of the norm before; a layer norm's is float32, and a biased one's [2 * hidden], the bias behind
            the weight.
        qkv: queries, keys and values, in this order; rows (heads + kv_heads) * head_dim + kv_heads * value_dim.
        o: the output projection, [hidden, heads * value_dim].
        cos_sin: float32 [positions, rotary_dim], as ``rotary`` takes it.
        qkv_bias: [rows of qkv].
        o_bias: [hidden]; of ranks one has it.
        q_norm: [head_dim], of the head norms of queries; where ``qk_norm_over`` is not "head", of all heads one after
            another.
        k_norm: the same of keys.
        sinks: [heads], a logit of each head that joins its softmax.
        post_norm: [hidden], of the norm after the output projection; as ``norm``.
        query_scale: float32 [positions], factors on queries, after rotary; the products are rounded.
    """

    norm: torch.Tensor | None
    qkv: PackedWeight
    o: PackedWeight
    cos_sin: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    post_norm: torch.Tensor | None = None
    query_scale: torch.Tensor | None = None


class MLPWeights(NamedTuple):
    """What an ``mlp_block`` needs beside its inputs; None where the model has no such weight.

    Attributes:
        norm: [hidden], of the norm before; a layer norm's is float32, and a biased one's [2 * hidden], the bias behind
            the weight.
        gate_up: [2 * inner, hidden], the gate's rows first; [inner, hidden] if there is no gate.
        down: [hidden, inner].
        gate_up_bias: [rows of gate_up].
        down_bias: [hidden]; of ranks one has it.
        post_norm: [hidden], of the norm after the projection down; as ``norm``.
    """

    norm: torch.Tensor | None
    gate_up: PackedWeight
    down: PackedWeight
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    post_norm: torch.Tensor | None = None


def linear_static(weight: LinearWeight) -> dict[str, Any]:
    """Static parameters of the ``linear`` or ``grouped_linear`` op for a declared weight."""
    sizes = {"columns": weight.columns, "rows": weight.rows}
    if weight.experts:
        return {"weight": weight, **sizes, "experts": weight.experts, "dtype": weight.dtype}
    return {"weight": weight, **sizes, "dtype": weight.dtype, "out": weight.out or weight.dtype}


def norm_qkv_rotary_write(static: Static, use: Use) -> OpFunction:
    heads, kv_heads, dim, value_dim = (static[k] for k in ("heads", "kv_heads", "head_dim", "value_dim"))
    sizes = [heads * dim, kv_heads * dim, kv_heads * value_dim]
    begin = first_norm(static, use)
    norms = [head_norm(static, use, n) for n in (heads, kv_heads)] if static["qk_norm"] else None
    project = use("linear", **linear_static(static["qkv"]))
    angles = {k: static[k] for k in ("rotary_dim", "interleaved", "dtype")}
    rotate = use("rotary", head_dim=dim, **angles) if static["rotary_dim"] else None
    write = use("state.write", state=static["state"])

    def run(
        x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, norm_weight: torch.Tensor,
        qkv: PackedWeight,
        qkv_bias: torch.Tensor | None, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, cos_sin: torch.Tensor,
        views: Any, meta: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        x, residual = begin(x, residual, norm_weight)
        q, k, v = project(x, qkv, qkv_bias).split(sizes, dim=-1)
        q, k = q.unflatten(-1, (heads, dim)), k.unflatten(-1, (kv_heads, dim))
        v = v.unflatten(-1, (kv_heads, value_dim))
        if norms is not None:
            q, k = norms[0](q, q_norm), norms[1](k, k_norm)
        if rotate is not None:
            q, k = rotate(positions, q, k, cos_sin)
        write(views, meta, k, v)
        return q, residual

    return run


def attention_block(static: Static, use: Use) -> OpFunction:
    """The projection's result has the compute type. ``post_norm`` takes that (of ranks: their sum), computes in float32
    and rounds to the compute type; ``offset`` is added to its weight, as to that of every root mean square norm of the
    block, head norms too. The stream stays in float32, and the block's result is added to it by whoever comes next."""
    if static["communicator"] is not None:
        return summed("attention_block", static, use, weights=3)
    outside = ("o", "post_norm", "query_scale", "communicator")
    enter = use("norm_qkv_rotary_write", **{k: v for k, v in static.items() if k not in outside})
    attend = use("state.attend", state=static["state"])
    project = use("linear", **linear_static(static["o"]))
    post = any_norm(static, use) if static["post_norm"] else None

    def run(
        x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, w: AttentionWeights, views: Any,
        meta: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        q, stream = enter(x, residual, positions, w.norm, w.qkv, w.qkv_bias, w.q_norm, w.k_norm, w.cos_sin, views, meta)
        if w.query_scale is not None:
            q = (q * w.query_scale[positions][:, None, None]).to(q.dtype)
        x = project(attend(views, meta, q, w.sinks).flatten(1), w.o, w.o_bias)
        return (post(x, w.post_norm) if post is not None else x), stream

    return run


def mlp_block(static: Static, use: Use) -> OpFunction:
    """Roundings, ``post_norm`` and ``offset`` are as in ``attention_block``."""
    if static["communicator"] is not None:
        return summed("mlp_block", static, use, weights=2)
    begin, post = add_norm(static, use), any_norm(static, use) if static["post_norm"] else None
    rise, fall = (use("linear", **linear_static(static[k])) for k in ("gate_up", "down"))
    own = {k: static[k] for k in ("inner", "activation", "dtype")}
    act = use("act_and_mul", **own, alpha=1.0, limit=0.0) if static["gated"] else use("activate", **own)

    def run(x: torch.Tensor, residual: torch.Tensor, w: MLPWeights) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = begin(x, residual, w.norm)
        x = fall(act(rise(x, w.gate_up, w.gate_up_bias)), w.down, w.down_bias)
        return (post(x, w.post_norm) if post is not None else x), residual

    return run


def decoder_layer(static: Static, use: Use) -> OpFunction:
    """Parallel: each half has the norm before and the norm after that its own static parameters say; what attention
    gives is added to the stream in float32, and what the MLP gives is the result beside it."""
    attention = use("attention_block", **static["attention"])
    mlp, parallel = use("mlp_block", **static["mlp"]), static["parallel"]

    def run(
        x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, attention_weights: AttentionWeights,
        mlp_weights: MLPWeights, views: Any, meta: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        x, residual = attention(x, residual, positions, attention_weights, views, meta)
        if not parallel:
            return mlp(x, residual, mlp_weights)  # type: ignore[no-any-return]
        y, residual = mlp(x.new_zeros(x.shape), residual, mlp_weights)
        return y, residual.add_(x)

    return run


def head(static: Static, use: Use) -> OpFunction:
    if static["communicator"] is not None:
        return vocab_head(static, use)
    norm = any_norm({**static, "dtype": "float32"}, use)
    project = use("linear", **linear_static(static["weight"]))
    cap = use("softcap", cap=static["cap"], dtype="float32") if static["cap"] else None
    narrow, factor = static["dtype"], static["logit_scale"]

    def run(
        x: torch.Tensor, norm_weight: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        import torch

        logits: torch.Tensor = project(norm(x, norm_weight).to(getattr(torch, narrow)), weight, bias)
        logits = logits if factor == 1.0 else logits * factor
        return cap(logits) if cap is not None else logits

    return run
