"""Products with packed matrices of a stack."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evener_kernels_triton.jit.packed_experts import gather_pairs_kernel, packed_grouped_kernel
from evener_kernels_triton.kernel import PRECISION
from evener_kernels_triton.packed import PackedMatrix, Segment
from evener_kernels_triton.tuning import MAX_SUMMED_TOKENS, Tuning, power_of_two

_BLOCK = 1024


@dataclass(frozen=True)
class ExpertAssignment:
    """Which pairs (token, choice) go to which matrix.

    Attributes:
        slots: int32 [T, top], the matrix of each pair; -1 for none.
        lists: int32 [matrices, room], the pairs of each; None if programs search ``slots``.
        counts: int32 [matrices], the number of pairs of each.
    """

    slots: torch.Tensor
    lists: torch.Tensor | None
    counts: torch.Tensor | None


def packed_grouped(
    tuning: Tuning, x: torch.Tensor, weight: PackedMatrix, y: torch.Tensor, work: ExpertAssignment, *, share: bool,
    bias: torch.Tensor | None = None, activation: str = "", alpha: float = 1.0, limit: float = 0.0,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """y [pairs, rows] as ``experts.grouped`` says, a launch for each segment; with an activation there is only one.
    Rows of a segment in act-order get a copy of each pair's row of x, its columns in the order of the pair's matrix.
    ``factors``: float32 [rows of x] that they are to be multiplied by.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    (tokens, top), (matrices, all_rows, columns) = work.slots.shape, weight.shape
    pairs, halves, listed = tokens * top, 2 if activation else 1, work.lists is not None
    if x.shape != (tokens if share else pairs, columns) or y.shape != (pairs, all_rows // halves) or x.stride(1) != 1:
        raise ValueError(
            f"x {list(x.shape)} and y {list(y.shape)} do not fit {tokens} x {top} choices of {list(weight.shape)}"
        )
    if activation and (len(weight.segments) > 1 or weight.segments[0].order is not None):
        raise ValueError("an activation needs rows of one format, and columns in the order of x")
    lists, counts = (work.lists, work.counts) if listed else (work.slots, work.slots)
    assert lists is not None, "listed"
    single = tokens == 1 and not listed
    given, shared, scaled = x, share, factors
    for one in weight.segments:
        rows, form = one.rows // halves, one.form
        x, share, factors = given, shared, scaled
        if one.order is not None:
            x, share = _gathered(tuning, x, one, work.slots, share), False
            factors = scaled.repeat_interleave(top) if scaled is not None and shared else scaled
        p = tuning.packed_grouped(pairs, matrices, rows, form.columns, x.dtype.itemsize, 0 if listed else tokens)
        across = -(-rows // p.n)
        low_each, high_each, scales_each, tops_each = one.matrix_strides
        packed_grouped_kernel[((pairs if single else matrices) * across,)](
            x, one.low, one.high, one.scales, one.tops, x if factors is None else factors,
            x if bias is None else bias[:, one.first :], y[:, one.first :] if one.first else y, work.slots, lists,
            counts, tokens, lists.shape[1], rows, columns, form.spans(columns), low_each, high_each, scales_each,
            tops_each, 0 if bias is None else bias.stride(0), x.stride(0), y.stride(0), alpha, limit,
            TOP=top, SHARE=share, ACT=activation, FACTORS=factors is not None, BIAS=bias is not None,
            TP=0 if listed else power_of_two(top), ONE=single, BM=p.m, BN=p.n, EVEN=columns % form.columns == 0,
            PRECISION=PRECISION, SUMS=p.m <= MAX_SUMMED_TOKENS, OVERLAP=tuning.overlap, num_warps=p.warps,
            num_stages=form.stages(p.stages, tuning.ptx), **form.constants(x.dtype, tuning.ptx), **tuning.launch,
        )  # fmt: skip
    return y


def _gathered(tuning: Tuning, x: torch.Tensor, weight: Segment, slots: torch.Tensor, share: bool) -> torch.Tensor:
    """x for each pair [pairs, columns], in the order of its matrix's columns."""
    assert weight.order is not None, "asked about a segment in act-order"
    (tokens, top), columns = slots.shape, weight.columns
    y = torch.empty(tokens * top, columns, dtype=x.dtype, device=x.device)
    gather_pairs_kernel[(tokens * top, -(-columns // _BLOCK))](
        x, weight.order, slots, y, columns, x.stride(0), weight.order.stride(0), TOP=top, SHARE=share,
        BLOCK=min(_BLOCK, power_of_two(columns)), OVERLAP=tuning.overlap, num_warps=4, **tuning.launch,
    )  # fmt: skip
    return y
