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

    A layer norm's weight and bias are one tensor, the bias behind the weight. ``sinks`` [heads] join each head's
    softmax; ``query_scale`` float32 [positions] are factors on queries.
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
    """What an ``mlp_block`` needs beside its inputs; ``gate_up`` is the first projection alone if it has no gate."""

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
