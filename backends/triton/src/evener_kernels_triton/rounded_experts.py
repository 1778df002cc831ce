"""Products of rounded activations with matrices of a stack."""

from __future__ import annotations

import torch

from evener_kernels_triton.jit.rounded_experts import rounded_grouped_kernel
from evener_kernels_triton.packed_experts import ExpertAssignment
from evener_kernels_triton.rounded import RoundedRows, most_columns, round_rows
from evener_kernels_triton.stored import StoredMatrix, pieces
from evener_kernels_triton.tuning import Tuning, power_of_two


def rounded_grouped(
    tuning: Tuning, x: torch.Tensor | RoundedRows, weight: StoredMatrix, y: torch.Tensor, work: ExpertAssignment, *,
    share: bool, bias: torch.Tensor | None = None, activation: str = "", alpha: float = 1.0, limit: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """y [pairs, rows] as ``experts.grouped`` says, of pairs that are listed."""
    assert work.lists is not None and work.counts is not None, "rounds is for so many tokens that pairs are listed"
    (tokens, top), (matrices, high, columns), halves = work.slots.shape, weight.shape, 2 if activation else 1
    rows, pairs, q = high // halves, tokens * top, x if isinstance(x, RoundedRows) else round_rows(tuning, x, weight)
    elements, scales, blocks, form = pieces(weight)
    p = tuning.rounded_grouped(pairs, matrices, rows, columns, halves, most_columns(form, q.group))
    same = form.wide > 0 and form.high % p.n == 0 and (halves == 1 or rows % p.n == 0)
    rounded_grouped_kernel[((pairs // p.m + min(pairs, matrices)) * -(-rows // p.n),)](
        q.elements, q.scales, elements.view(q.elements.dtype), scales, bias if bias is not None else scales, y,
        work.lists, work.counts, matrices, q.elements.shape[0], work.lists.shape[1], rows, columns, blocks,
        scales.stride(0), y.stride(0), alpha, limit, TOP=top, SHARE=share, ACT=activation, BIAS=bias is not None,
        EP=power_of_two(matrices), BM=p.m, BN=p.n, BK=p.k, EVEN=columns % p.k == 0, HIGH=form.high, WIDE=form.wide,
        GROUP=q.group, SAME=same and activation != "clamped_swiglu", INTEGER=form.kind == "int8",
        OVERLAP=tuning.overlap, num_warps=p.warps, num_stages=p.stages, **tuning.launch,
    )  # fmt: skip
    return y
