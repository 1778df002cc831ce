"""Latent attention (MLA) in a few launches: projections, rotation and write, attention in latent space, values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from evener.contracts.ops import OpCall, OpFunction, Variant
from evener.contracts.state import SplitMetadata
from evener.contracts.statics import LatentStatic
from evener.contracts.weights import LatentWeights
from evener.ops.latent import INNER_EPS
from evener.ops.reference.linear import PLAIN
from evener_kernels_triton.composites import enter_rows
from evener_kernels_triton.jit.latent import (
    latent_one_value_kernel,
    latent_prefill_kernel,
    latent_query_kernel,
    latent_value_kernel,
)
from evener_kernels_triton.kernel import PRECISION, TritonKernel
from evener_kernels_triton.latent_state import LATENT_LAYOUT, LOG2_E, LatentMeta, LatentState, LatentViews, Parts
from evener_kernels_triton.linear import library_linear, partial_sums, persistent_gemv, project_rows
from evener_kernels_triton.primitives import norm_rows
from evener_kernels_triton.tuning import MIN_TILES, Tuning, power_of_two
from evener_kernels_triton.variants import combined, products

#: One program holds a head's unrotated query part, or its value, so neither may be longer than this.
_MAX_HEAD_PART = 256


class TritonLatentAttentionBlock(TritonKernel):
    """Attention runs in latent space, also for many new tokens, unless these are all whole prompts: then keys and
    values are expanded, which takes a third of the operations.

    Launches for one token: norm and projection; rotation, write and queries into latent space; attention; merge and
    values; output projection.
    """

    op = "latent_attention_block"
    packings = (PLAIN,)
    priority = 100
    state_layout = LATENT_LAYOUT

    def _unsupported_reason(self, call: OpCall) -> str | None:
        s = cast(LatentStatic, call.static)
        if s["sparse"]:
            return "attends to every earlier token, not to selected ones"
        if s["absorb"] != "absorb-without-precomp":
            return f"absorbs without precomputed products, but mla_absorb is {s['absorb']}"
        if max(s["nope_dim"], s["value_dim"]) > _MAX_HEAD_PART:
            return f"parts of heads are longer than {_MAX_HEAD_PART}"
        return None

    def workspace(self, call: OpCall) -> int:
        s, tuning, high = cast(LatentStatic, call.static), self.tuning.with_changes(call.variant), call.bucket.high
        slot = s["state"]
        assert slot.provider is not None, "state is resolved before composites"
        heads, rank, value, down = s["heads"], s["rank"], s["value_dim"], s["down"].rows
        size: int = getattr(torch, s["dtype"]).itemsize
        query = heads * (s["nope_dim"] + s["rope_dim"]) if s["q_rank"] else 0
        inside = max(heads * (2 * rank + s["rope_dim"]), self._expanded(call)) * size
        # At most as many requests as there are units are split in a step; the others run before or after them.
        split = min(high, tuning.units) * inside
        split += slot.provider.workspace(slot.spec, slot.attention, high, 0)
        # By launch, numbers for each token and further bytes: projections, low-rank queries, attention, values.
        stages = [
            (s["hidden"] + down, partial_sums(tuning.part("enter"), call, down, s["hidden"])),
            (down + heads * value + query, max(high * inside, split)),
            (down + heads * value, partial_sums(tuning.part("project"), call, s["o"].rows, s["o"].columns)),
        ]
        if s["q"] is not None and s["q_rank"]:
            stages.append((down + query + s["q_rank"], partial_sums(tuning, call, s["q"].rows, s["q_rank"])))
        return max(int(high * width * size + rest) for width, rest in stages)

    def _expanded(self, call: OpCall) -> int:
        """Numbers for each token of a whole prompt: its rotated query, its state, its keys and values."""
        s = cast(LatentStatic, call.static)
        return int(s["heads"] * (s["rope_dim"] + s["nope_dim"] + s["value_dim"]) + s["rank"] + s["rope_dim"])

    def variants(self, call: OpCall) -> Sequence[Variant]:
        s = cast(LatentStatic, call.static)
        entry = products(self.tuning, call, s["down"].rows, s["hidden"])
        return combined({"enter": entry, "project": products(self.tuning, call, s["o"].rows, s["o"].columns)})

    def build(self, call: OpCall) -> OpFunction:
        tuning, s = self.tuning.with_changes(call.variant), cast(LatentStatic, call.static)
        dtype = getattr(torch, s["dtype"])
        width = s["q_rank"] or s["heads"] * (s["nope_dim"] + s["rope_dim"])
        enter = enter_rows(tuning.part("enter"), call, s["down"])
        leave = project_rows(tuning.part("project"), call, dtype, s["o"])
        queries, inward, outward = (
            _queries(tuning, call),
            _to_latent_space(tuning, call),
            _from_latent_space(tuning, call),
        )
        attend_prefill = _prefill(tuning, call)
        provider = cast(LatentState, s["state"].provider)

        def attend(
            query: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor, w: LatentWeights, views: LatentViews,
            part: LatentMeta, out: torch.Tensor,
        ) -> None:  # fmt: skip
            if part.whole:
                attend_prefill(query, latent, positions, w, views, part, out)
                return
            inside = inward(query, latent, positions, w, views, part)
            found, pieces = provider.attend_parts(views, part, inside, inside.shape[0] == 1)
            if pieces is not None and found.shape[0] > 1:  # for one token, every program of the next kernel does it
                found, pieces = provider.merge(views, part, pieces, found), None
            outward(found, pieces, w, part, out)

        def run(
            x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, w: LatentWeights,
            views: LatentViews, meta: LatentMeta | SplitMetadata, *index: Any,
        ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
            wide, total = enter(x, residual, w.norm, w.down.data, w.down_bias)
            query = queries(wide[:, :width], w)
            found = torch.empty(wide.shape[0], s["heads"] * s["value_dim"], dtype=dtype, device=wide.device)
            for part, rows in _rows(meta, wide.shape[0]):
                attend(query[rows], wide[rows, width:], positions[rows], w, views, part, found[rows])
            del query  # of the largest; the values need none of it
            return leave(found, w.o.data, w.o_bias), total

        return run


def _rows(meta: Any, tokens: int) -> list[tuple[LatentMeta, slice]]:
    """Metadata of each part of a step, and its tokens."""
    if not isinstance(meta, SplitMetadata):
        return list(meta.runs) or [(meta, slice(0, tokens))]
    found = [] if meta.decode is None else [(meta.decode, slice(0, meta.tokens))]
    if meta.prefill is not None:
        for part, rows in _rows(meta.prefill, tokens - meta.tokens):
            found.append((part, slice(meta.tokens + rows.start, meta.tokens + rows.stop)))
    return found


def _queries(tuning: Tuning, call: OpCall) -> Callable[[torch.Tensor, LatentWeights], torch.Tensor]:
    """Queries from the first projection: directly, or through a norm and a second projection."""
    s = cast(LatentStatic, call.static)
    dtype = getattr(torch, s["dtype"])
    if s["q"] is None or s["q_rank"] is None:
        return lambda x, w: x
    project = project_rows(tuning, call, dtype, s["q"])

    def one(x: torch.Tensor, w: LatentWeights) -> torch.Tensor:
        assert w.q is not None and w.q_norm is not None, "queries have a rank"
        return persistent_gemv(tuning, x, w.q.data, dtype, gain=w.q_norm, eps=INNER_EPS)

    def some(x: torch.Tensor, w: LatentWeights) -> torch.Tensor:
        assert w.q is not None and w.q_norm is not None, "queries have a rank"
        return project(norm_rows(tuning, x, None, w.q_norm, INNER_EPS, 0.0, dtype)[0], w.q.data, None)

    fits = call.bucket.high == 1 and tuning.persistent_gemv(s["q"].rows, s["q_rank"], 1) is not None
    return one if fits else some


def _to_latent_space(tuning: Tuning, call: OpCall) -> Callable[..., torch.Tensor]:
    """Project queries into latent space, and write the new tokens' state to its pages."""
    enter, s = _enter(tuning, call), cast(LatentStatic, call.static)

    def run(query: torch.Tensor, latent: torch.Tensor, *rest: Any) -> torch.Tensor:
        inside = query.new_empty(query.shape[0], s["heads"], s["rank"] + s["rope_dim"])
        enter(query, latent, *rest, inside, None)
        return inside

    return run


def _enter(tuning: Tuning, call: OpCall) -> Callable[..., None]:
    """The launch that writes state. It computes queries in latent space; with ``rows`` [T, rank + rope] only rotated
    ones, and copies the state to ``rows``."""
    s = cast(LatentStatic, call.static)
    heads, rank = s["heads"], s["rank"]
    sizes = {
        "HEADS": heads, "NOPE": s["nope_dim"], "VALUE": s["value_dim"], "NP": max(16, power_of_two(s["nope_dim"])),
        "HP": min(16, power_of_two(heads)), "INTERLEAVED": bool(s["interleaved"]), "PRECISION": PRECISION,
        "OVERLAP": tuning.overlap,
    }  # fmt: skip

    def run(
        query: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor, w: LatentWeights, views: LatentViews,
        meta: LatentMeta, inside: torch.Tensor, rows: torch.Tensor | None,
    ) -> None:  # fmt: skip
        tokens = query.shape[0]
        p = tuning.latent_product(tokens, rank)
        products = 0 if rows is not None else heads * -(-rank // p.n) * -(-tokens // p.m)
        latent_query_kernel[(products + tokens,)](
            positions, meta.step.slot_mapping, query, w.heads, latent, w.kv_norm, w.cos_sin, inside,
            rows if rows is not None else inside, views.rows, tokens, products, query.stride(0), latent.stride(0),
            views.rows.stride(0), INNER_EPS, BM=p.m, BN=p.n, EXPAND=rows is not None, LATE=tokens == 1,
            num_warps=p.warps, **sizes, **views.sizes, **tuning.launch,
        )  # fmt: skip

    return run


def _prefill(tuning: Tuning, call: OpCall) -> Callable[..., None]:
    """Whole prompts: compute keys and values from the latents, and attend to these."""
    enter, s = _enter(tuning, call), cast(LatentStatic, call.static)
    heads, nope, rope, value, rank = s["heads"], s["nope_dim"], s["rope_dim"], s["value_dim"], s["rank"]
    p = tuning.prefill_tile(getattr(torch, s["dtype"]).itemsize)
    sizes = {
        "HEADS": heads, "NOPE": nope, "VALUE": value, "ROPE": rope, "NP": max(16, power_of_two(nope)),
        "VP": max(16, power_of_two(value)), "EP": max(16, power_of_two(rope)), "PRECISION": PRECISION,
    }  # fmt: skip
    scale = s["state"].attention.scale * LOG2_E

    def run(
        query: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor, w: LatentWeights, views: LatentViews,
        meta: LatentMeta, out: torch.Tensor,
    ) -> None:  # fmt: skip
        rotated, rows = query.new_empty(query.shape[0], heads, rope), query.new_empty(query.shape[0], rank + rope)
        enter(query, latent, positions, w, views, meta, rotated, rows)
        kv = library_linear(rows.dtype, rows[:, :rank], w.kv_b.data)
        step = meta.step
        latent_prefill_kernel[(step.tokens // p.m + step.requests, heads)](
            query, rotated, kv, rows[:, rank:], step.query_start, out, query.stride(0), kv.stride(0), rows.stride(0),
            step.requests, scale, M=p.m, N=p.n, num_warps=p.warps, num_stages=p.stages, **sizes,
        )  # fmt: skip

    return run


def _from_latent_space(tuning: Tuning, call: OpCall) -> Callable[..., None]:
    """Convert the result of attention, or its parts, to values [T, heads * value_dim]."""
    s = cast(LatentStatic, call.static)
    heads, value, rank = s["heads"], s["value_dim"], s["rank"]
    sizes: dict[str, Any] = {
        "HEADS": heads, "NOPE": s["nope_dim"], "VALUE": value, "RANK": rank, "RP": max(16, power_of_two(rank)),
        "OVERLAP": tuning.overlap, **tuning.launch,
    }  # fmt: skip

    def run(found: torch.Tensor, parts: Parts | None, w: LatentWeights, meta: LatentMeta, out: torch.Tensor) -> None:
        tokens = found.shape[0]
        p = tuning.latent_values(tokens, value, sizes["RP"])
        across = heads * -(-value // p.n)
        if parts is None:
            latent_value_kernel[(across, -(-tokens // p.m))](
                found, w.heads, out, tokens, BM=p.m if tokens > 1 else 1, BV=p.n, BK=p.k, PRECISION=PRECISION,
                num_warps=p.warps, num_stages=p.stages, **sizes,
            )  # fmt: skip
            return
        latent_one_value_kernel[(across,)](
            parts.sums, parts.stats, meta.step.kv_lens, w.heads, out, parts.splits, BV=p.n,
            BS=min(p.m, power_of_two(parts.splits)), N=parts.tile, MIN_TILES=MIN_TILES, S=power_of_two(parts.splits),
            num_warps=p.warps, **sizes,
        )  # fmt: skip

    return run


LATENT = (TritonLatentAttentionBlock,)
