"""What hybrid models mix tokens with: a gated delta net (a recurrence), and attention whose result is gated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from evener.contracts.ops import OpFunction, Use
from evener.ops.composites import linear_static
from evener.ops.norms import Static, first_norm, norm_static
from evener.ops.ranks import summed

if TYPE_CHECKING:
    import torch

    from evener.contracts.quant import PackedWeight


class DeltaWeights(NamedTuple):
    """What a ``delta_block`` needs beside its inputs.

    Attributes:
        norm: [hidden], of the norm before.
        enter: makes queries, keys, values and gates; those of one key head lie together.
        filters: [channels, 1, width], of the convolution.
        a_log: float32 [heads], as ``delta_gates`` takes it.
        dt_bias: float32 [heads], the same.
        inner_norm: [value_dim], of the gated norm; without ``offset``.
        o: the output projection, [hidden, heads * value_dim].
    """

    norm: torch.Tensor
    enter: PackedWeight
    filters: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    inner_norm: torch.Tensor
    o: PackedWeight


class GatedAttentionWeights(NamedTuple):
    """What a ``gated_attention_block`` needs beside its inputs; None where the model has no such weight.

    Attributes:
        norm: [hidden], of the norm before.
        qkv: queries with their gates (each head's query, then its gate), keys, values.
        o: the output projection, [hidden, heads * head_dim].
        cos_sin: float32 [positions, rotary_dim], as ``rotary`` takes it.
        q_norm: [head_dim], of the head norms of queries.
        k_norm: [head_dim], of those of keys.
        qkv_bias: [rows of qkv].
        o_bias: [hidden]; of ranks one has it.
    """

    norm: torch.Tensor
    qkv: PackedWeight
    o: PackedWeight
    cos_sin: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None


def delta_block(static: Static, use: Use) -> OpFunction:
    if static["communicator"] is not None:
        return summed("delta_block", static, use, weights=2)
    heads, key_heads, key_dim, value_dim = (static[k] for k in ("heads", "key_heads", "key_dim", "value_dim"))
    share = heads // key_heads
    begin = first_norm(static, use)
    enter, leave = use("linear", **linear_static(static["enter"])), use("linear", **linear_static(static["o"]))
    gates = use("delta_gates", heads=heads, dtype=static["dtype"])
    inner = use("gated_rms_norm", hidden=value_dim, eps=static["eps"], dtype=static["dtype"])
    advance = use("state.advance", state=static["state"])
    parts = [key_dim, key_dim, share * value_dim, share * value_dim]

    def run(
        x: torch.Tensor, residual: torch.Tensor | None, w: DeltaWeights, views: Any, meta: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        x, residual = begin(x, residual, w.norm)
        wide, ba = enter(x, w.enter, None).split([key_heads * sum(parts), 2 * heads], dim=-1)
        # Queries, keys, values and gates of one key head lie together, as do its gates' two numbers.
        q, k, v, z = wide.unflatten(-1, (key_heads, -1)).split(parts, dim=-1)
        b, a = ba.unflatten(-1, (key_heads, 2 * share)).split(share, dim=-1)
        decay, beta = gates(a.flatten(1), b.flatten(1), w.a_log, w.dt_bias)
        mixed = torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1)
        out = advance(views, meta, mixed, w.filters.flatten(1), decay, beta)
        out = inner(out, z.flatten(1).unflatten(-1, (heads, value_dim)), w.inner_norm)
        return leave(out.flatten(1), w.o, None), residual

    return run


def gated_attention_block(static: Static, use: Use) -> OpFunction:
    if static["communicator"] is not None:
        return summed("gated_attention_block", static, use, weights=3)
    heads, kv_heads, dim = (static[k] for k in ("heads", "kv_heads", "head_dim"))
    begin = first_norm(static, use)
    head_norm = use("rms_norm", **norm_static(static, dim))
    enter, leave = use("linear", **linear_static(static["qkv"])), use("linear", **linear_static(static["o"]))
    rotary = {"rotary_dim": static["rotary_dim"], "interleaved": False, "dtype": static["dtype"]}
    rotate = use("rotary", head_dim=dim, **rotary)
    write, attend = (use(f"state.{name}", state=static["state"]) for name in ("write", "attend"))
    sizes = [heads * 2 * dim, kv_heads * dim, kv_heads * dim]

    def run(
        x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, w: GatedAttentionWeights, views: Any,
        meta: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        x, residual = begin(x, residual, w.norm)
        wide, k, v = enter(x, w.qkv, w.qkv_bias).split(sizes, dim=-1)
        q, gate = wide.unflatten(-1, (heads, 2 * dim)).chunk(2, dim=-1)
        k, v = (part.unflatten(-1, (kv_heads, dim)) for part in (k, v))
        q, k = rotate(positions, head_norm(q, w.q_norm), head_norm(k, w.k_norm), w.cos_sin)
        write(views, meta, k, v)
        out = attend(views, meta, q) * gate.float().sigmoid().to(x.dtype)
        return leave(out.flatten(1), w.o, w.o_bias), residual

    return run
