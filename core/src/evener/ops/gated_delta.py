"""References of the blocks of hybrid models: a gated delta net (a recurrence, Yang et al. 2024) and gated attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evener.contracts.ops import OpFunction, Use
from evener.contracts.statics import DeltaStatic, GatedAttentionStatic
from evener.contracts.weights import DeltaWeights, GatedAttentionWeights
from evener.ops.composites import linear_static
from evener.ops.norms import first_norm, norm_static
from evener.ops.ranks import all_reduce_block

if TYPE_CHECKING:
    import torch


def delta_block(static: DeltaStatic, use: Use) -> OpFunction:
    if static["communicator"] is not None:
        return all_reduce_block("delta_block", static, use, weights=2)
    heads, key_heads, key_dim, value_dim = static["heads"], static["key_heads"], static["key_dim"], static["value_dim"]
    share = heads // key_heads
    begin = first_norm(static, use)
    in_proj, out_proj = use("linear", **linear_static(static["in_proj"])), use("linear", **linear_static(static["o"]))
    gates = use("delta_gates", heads=heads, dtype=static["dtype"])
    inner = use("gated_rms_norm", hidden=value_dim, eps=static["eps"], dtype=static["dtype"])
    advance = use("state.advance", state=static["state"])
    parts = [key_dim, key_dim, share * value_dim, share * value_dim]

    def run(
        x: torch.Tensor, residual: torch.Tensor | None, w: DeltaWeights, views: Any, meta: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        x, residual = begin(x, residual, w.norm)
        wide, ba = in_proj(x, w.in_proj, None).split([key_heads * sum(parts), 2 * heads], dim=-1)
        # Rows are grouped by key head: query, key, values and gates of each; after these, b and a of each.
        q, k, v, z = wide.unflatten(-1, (key_heads, -1)).split(parts, dim=-1)
        b, a = ba.unflatten(-1, (key_heads, 2 * share)).split(share, dim=-1)
        decay, beta = gates(a.flatten(1), b.flatten(1), w.a_log, w.dt_bias)
        mixed = torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1)
        out = advance(views, meta, mixed, w.filters.flatten(1), decay, beta)
        out = inner(out, z.flatten(1).unflatten(-1, (heads, value_dim)), w.inner_norm)
        return out_proj(out.flatten(1), w.o, None), residual

    return run


def gated_attention_block(static: GatedAttentionStatic, use: Use) -> OpFunction:
    if static["communicator"] is not None:
        return all_reduce_block("gated_attention_block", static, use, weights=3)
    heads, kv_heads, dim = static["heads"], static["kv_heads"], static["head_dim"]
    begin = first_norm(static, use)
    head_norm = use("rms_norm", **norm_static(static, dim))
    in_proj, out_proj = use("linear", **linear_static(static["qkv"])), use("linear", **linear_static(static["o"]))
    rotary = static["rotary_dim"]
    rotate = use("rotary", head_dim=dim, rotary_dim=rotary, interleaved=False, dtype=static["dtype"])
    write, attend = (use(f"state.{name}", state=static["state"]) for name in ("write", "attend"))
    sizes = [heads * 2 * dim, kv_heads * dim, kv_heads * dim]

    def run(
        x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, w: GatedAttentionWeights, views: Any,
        meta: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        x, residual = begin(x, residual, w.norm)
        wide, k, v = in_proj(x, w.qkv, w.qkv_bias).split(sizes, dim=-1)
        q, gate = wide.unflatten(-1, (heads, 2 * dim)).chunk(2, dim=-1)
        k, v = (part.unflatten(-1, (kv_heads, dim)) for part in (k, v))
        q, k = rotate(positions, head_norm(q, w.q_norm), head_norm(k, w.k_norm), w.cos_sin)
        write(views, meta, k, v)
        out = attend(views, meta, q) * gate.float().sigmoid().to(x.dtype)
        return out_proj(out.flatten(1), w.o, w.o_bias), residual

    return run
