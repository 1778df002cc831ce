"""References of composite ops, written with other ops. Each function takes ``(static, use)`` and returns the callable.

``use`` returns what resolution chose for another op. So a faster primitive is used inside a composite, and a kernel for
the composite replaces all of them, without a change in any model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evener.contracts import statics
from evener.contracts.ops import OpFunction, Static, Use
from evener.contracts.weights import AttentionWeights, MLPWeights, MoEWeights
from evener.ops.norms import add_norm, any_norm, first_norm, head_norm
from evener.ops.ranks import all_reduce_block, vocab_head

if TYPE_CHECKING:
    import torch

    from evener.contracts.declared import LinearWeight
    from evener.contracts.quant import PackedWeight


def linear_static(weight: LinearWeight) -> dict[str, Any]:
    """Static parameters of the ``linear`` or ``grouped_linear`` op for a declared weight."""
    sizes = {"columns": weight.columns, "rows": weight.rows}
    if weight.experts:
        return {"weight": weight, **sizes, "experts": weight.experts, "dtype": weight.dtype}
    return {"weight": weight, **sizes, "dtype": weight.dtype, "out": weight.out or weight.dtype}


def norm_qkv_rotary_write(static: statics.QKVStatic, use: Use) -> OpFunction:
    heads, kv_heads, dim, value_dim = static["heads"], static["kv_heads"], static["head_dim"], static["value_dim"]
    sizes = [heads * dim, kv_heads * dim, kv_heads * value_dim]
    begin = first_norm(static, use)
    norms = [head_norm(static, use, n) for n in (heads, kv_heads)] if static["qk_norm"] else None
    project = use("linear", **linear_static(static["qkv"]))
    rotary, pairs, dtype = static["rotary_dim"], static["interleaved"], static["dtype"]
    rotate = use("rotary", head_dim=dim, rotary_dim=rotary, interleaved=pairs, dtype=dtype) if rotary else None
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


def attention_block(static: statics.AttentionStatic, use: Use) -> OpFunction:
    """The output projection gives the compute dtype. ``post_norm`` takes that (with several ranks: their sum), computes
    in float32 and rounds to the compute dtype. ``offset`` is added to the weight of every root mean square norm of the
    block, head norms too. The residual stays in float32; the next block adds this block's result to it."""
    if static["communicator"] is not None:
        return all_reduce_block("attention_block", static, use, weights=3)
    enter = use("norm_qkv_rotary_write", **statics.select(static, statics.QKVStatic))
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


def mlp_block(static: statics.MLPStatic, use: Use) -> OpFunction:
    """Rounding, ``post_norm`` and ``offset`` as in ``attention_block``."""
    if static["communicator"] is not None:
        return all_reduce_block("mlp_block", static, use, weights=2)
    begin, post = add_norm(static, use), any_norm(static, use) if static["post_norm"] else None
    gate_up, down = (use("linear", **linear_static(weight)) for weight in (static["gate_up"], static["down"]))
    own: Static = {"inner": static["inner"], "activation": static["activation"], "dtype": static["dtype"]}
    act = use("act_and_mul", **own, alpha=1.0, limit=0.0) if static["gated"] else use("activate", **own)

    def run(x: torch.Tensor, residual: torch.Tensor, w: MLPWeights) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = begin(x, residual, w.norm)
        x = down(act(gate_up(x, w.gate_up, w.gate_up_bias)), w.down, w.down_bias)
        return (post(x, w.post_norm) if post is not None else x), residual

    return run


def _act(static: Static, use: Use, inner: int, rows_per_token: int = 1) -> OpFunction:
    kind: Static = {"activation": static["activation"], "alpha": static["alpha"], "limit": static["limit"]}
    return use("act_and_mul", sizes={"T": rows_per_token}, inner=inner, dtype=static["dtype"], **kind)


def routed_experts(static: statics.ExpertsStatic, use: Use) -> OpFunction:
    place = use("place_experts", experts=static["experts"])
    router_weight_on_input, top = static["router_weight_on_input"], static["top"]
    gate_up = use(
        "grouped_linear", sizes={"T" if router_weight_on_input else "K": top}, **linear_static(static["gate_up"])
    )
    act = _act(static, use, static["inner"], top)
    down = use("grouped_linear", sizes={"T": top}, **linear_static(static["down"]))
    mix = use("mix_experts", sizes={"K": top}, hidden=static["hidden"], dtype=static["dtype"])

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w: MoEWeights) -> torch.Tensor:
        slots = place(ids, w.slots, w.copies)
        single = slots.reshape(-1, 1)
        if router_weight_on_input:
            rows = (x.float()[:, None] * weights[..., None]).flatten(0, 1).to(x.dtype)
            gate_up_rows = gate_up(rows, w.gate_up, single, w.gate_up_bias)
            weights = weights.new_ones(weights.shape)
        else:
            gate_up_rows = gate_up(x, w.gate_up, slots, w.gate_up_bias)
        h = act(gate_up_rows.flatten(0, 1))
        del gate_up_rows  # the intermediate of the experts is the largest tensor of the block
        down_rows = down(h, w.down, single, w.down_bias)
        del h
        return mix(down_rows.view(*slots.shape, -1), weights)  # type: ignore[no-any-return]

    return run


def _shared(static: statics.MoEStatic, use: Use) -> OpFunction | None:
    """The shared experts, which compute every row; None if there are none."""
    if static["shared_gate_up"] is None or static["shared_down"] is None:
        return None
    gate_up, down = (use("linear", **linear_static(w)) for w in (static["shared_gate_up"], static["shared_down"]))
    act = _act(static, use, static["shared_inner"])
    gate = use("linear", **linear_static(static["shared_gate"])) if static["shared_gate"] is not None else None

    def run(x: torch.Tensor, w: MoEWeights) -> torch.Tensor:
        y: torch.Tensor = down(act(gate_up(x, w.shared_gate_up, None)), w.shared_down, None)
        return y if gate is None else y * gate(x, w.shared_gate, None).sigmoid()

    return run


def moe_block(static: statics.MoEStatic, use: Use) -> OpFunction:
    if static["communicator"] is not None:
        return all_reduce_block("moe_block", static, use, weights=2)
    begin, shared, placed = add_norm(static, use), _shared(static, use), static["placement"] is not None
    score = use("linear", **linear_static(static["router"]))
    route = use("route", **statics.select(static, statics.RouteStatic))
    experts = use("routed_experts", **statics.select(static, statics.ExpertsStatic))
    post = any_norm(static, use) if static["post_norm"] else None

    def run(x: torch.Tensor, residual: torch.Tensor, w: MoEWeights) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = begin(x, residual, w.norm)
        y = experts(x, *route(score(x, w.router, w.router_bias), w.correction), w)
        both = None if shared is None else shared(x, w)
        if placed:  # until now they were computed elsewhere, at the same time
            y = y()
        y = y if both is None else y + both
        return (post(y, w.post_norm) if post is not None else y), residual

    return run


def decoder_layer(static: statics.DecoderLayerStatic, use: Use) -> OpFunction:
    """If parallel, each half has the norms before and after it that its own static parameters say. The result of
    attention is added to the residual in float32, and the result of the MLP is returned as ``x``."""
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


def head(static: statics.HeadStatic, use: Use) -> OpFunction:
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
