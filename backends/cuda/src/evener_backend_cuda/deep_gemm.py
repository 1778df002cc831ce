"""Linear layers and expert products by DeepGEMM (DeepSeek), in bfloat16 on Hopper.

It compiles a kernel for each shape at its first run, so its products cannot be captured.
"""

from __future__ import annotations

import torch

from evener.contracts.ops import Kernel, OpCall, OpFunction
from evener.contracts.quant import PackedWeight
from evener.ops.reference.linear import PLAIN
from evener_backend_cuda.library import DEEP_GEMM
from evener_backend_parts.paged_library import PRIORITY

#: Elements of a row must be a multiple of this: its loads need rows of a multiple of 16 bytes.
_ALIGNED = 8


class _DeepGemm(Kernel):
    priority = PRIORITY
    packings = (PLAIN,)

    def supports(self, call: OpCall) -> str | None:
        lacking, s = DEEP_GEMM.refusal(call.device.variant), call.static
        if lacking:
            return lacking
        if s["dtype"] != "bfloat16" or s.get("out", "bfloat16") != "bfloat16":
            return f"computes in bfloat16, not in {s['dtype']} to {s.get('out', s['dtype'])}"
        if s["rows"] % _ALIGNED or s["columns"] % _ALIGNED:
            return f"needs rows and columns that are multiples of {_ALIGNED}, not {s['rows']} x {s['columns']}"
        return None


class DeepGemmLinear(_DeepGemm):
    """x @ weightᵀ; the bias is added afterwards."""

    op, name = "linear", "deep_gemm.linear"

    def build(self, call: OpCall) -> OpFunction:
        library, rows = DEEP_GEMM.load(), call.static["rows"]

        def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
            y = x.new_empty(x.shape[0], rows)
            if y.numel():
                library.bf16_gemm_nt(a=x.contiguous(), b=weight.data, d=y)
            return y if bias is None else y.add_(bias)

        return run


class DeepGemmGroupedLinear(_DeepGemm):
    """Pairs of token and expert, sorted by expert, with each expert's rows padded to a tile.

    Row numbers are computed on the device: there is room for the worst case, and padding rows have expert -1, which the
    library skips.
    """

    op, name = "grouped_linear", "deep_gemm.experts"

    def build(self, call: OpCall) -> OpFunction:
        library, rows, experts = DEEP_GEMM.load(), call.static["rows"], call.static["experts"]
        tile = int(library.get_m_alignment_for_contiguous_layout())

        def run(
            x: torch.Tensor, weight: PackedWeight, slots: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            if not slots.numel():
                return x.new_zeros(*slots.shape, rows)
            place, row_experts = group_rows_by_expert(slots.flatten(), experts, tile)
            # The row after the last tile takes the pairs without an expert.
            spread = x.new_zeros(row_experts.shape[0] + 1, x.shape[1])
            spread[place] = x.repeat_interleave(slots.shape[1], 0)
            out = x.new_zeros(row_experts.shape[0] + 1, rows)
            library.m_grouped_bf16_gemm_nt_contiguous(
                a=spread[:-1], b=weight.data, d=out[:-1], grouped_layout=row_experts
            )
            if bias is not None:
                out[:-1] += bias[row_experts.clamp_min(0).long()]
            return out[place].view(*slots.shape, rows)

        return run


def group_rows_by_expert(slots: torch.Tensor, experts: int, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(row of each pair, int64 [P], which is ``rows`` for pairs without an expert; expert of each row, int32 [rows], -1
    for none). ``slots``: int32 [P], the pairs' experts, -1 for none."""
    room = (slots.shape[0] + min(experts, slots.shape[0]) * (tile - 1) + tile - 1) // tile * tile
    named = torch.where(slots < 0, experts, slots).long()
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=slots.device)
    counts.scatter_add_(0, named, torch.ones_like(named))
    ends = ((counts[:experts] + tile - 1) // tile * tile).cumsum(0)
    starts = ends - (counts[:experts] + tile - 1) // tile * tile
    order = named.argsort(stable=True)
    first = counts.cumsum(0) - counts
    rank = torch.empty_like(named)
    rank[order] = torch.arange(len(named), device=slots.device) - first[named[order]]
    begin = torch.cat((starts, starts.new_full((1,), room)))
    place = begin[named] + torch.where(slots < 0, 0, rank)
    row_experts = torch.full((room + 1,), -1, dtype=torch.int32, device=slots.device)
    row_experts[place] = slots.to(torch.int32)
    return place, row_experts[:-1]
