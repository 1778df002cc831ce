"""One token's experts over packed weights of four bits: the routing is in each of two launches."""

import triton
import triton.language as tl

from evener_kernels_triton.jit.experts import gated
from evener_kernels_triton.jit.launch import fast_launch
from evener_kernels_triton.jit.packed_token import (
    PIECE,
    factor,
    halves_of,
    held_pieces,
    load_x,
    packed_tile,
    row_sums,
    spread,
    whole_numbers,
)
from evener_kernels_triton.jit.routing import chosen


@fast_launch
@triton.jit
def packed_token_up_kernel(
    logits, correction, slots, x, gain, low, scales, tops, bias, y, most, rows, columns, spans, low_each, scales_each,
    tops_each, scale, eps, offset, alpha, limit,
    BIAS: tl.constexpr, ACT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STYLE: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, BF16: tl.constexpr, UNITS: tl.constexpr, WORDS: tl.constexpr,
    PTX: tl.constexpr, OVERLAP: tl.constexpr,
    CORRECT: tl.constexpr, SCORING: tl.constexpr, TOP: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, RENORMALIZE: tl.constexpr, GP: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """``single_token_up_kernel`` of packed weights; its names. ``low`` is int64, and a tile has gate rows and up
    rows."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    k = tl.program_id(0)
    expert, rank, taken, _ = chosen(
        logits, 0, logits, correction, scale, 1, False, CORRECT, SCORING, TOP, GROUPS, EACH, TOP_GROUPS, GROUP_BEST,
        RENORMALIZE, GP, EP, False,
    )  # fmt: skip
    slot = tl.load(slots + tl.sum(tl.where(taken & (rank == k), expert, 0), 0) * most)
    readable = tl.where(slot >= 0, rows, 0)
    wide = slot.to(tl.int64)
    own_low = low + wide * low_each
    own_scales = scales + wide * scales_each
    own_tops = tops + wide * tops_each
    r = tl.arange(0, BN * 2)
    own = r // 2
    half = r % 2
    start = tl.program_id(1) * BN
    step = tl.num_programs(1) * BN
    there = held_pieces(spans, UNITS, BK, BK)
    n = start + own
    row = n * 2 + half if ACT == "clamped_swiglu" else n + half * rows
    a, b, s, z, m = packed_tile(
        own_low, own_scales, own_tops, row, n < readable, rows * 2, spans, there, BK, BK, STYLE, GROUP, UNITS, WORDS
    )
    v0 = load_x(x, columns, 0, BK, BK, 1)
    v1 = load_x(x, columns, 1, BK, BK, 1)
    v2 = load_x(x, columns, 2, BK, BK, 1)
    v3 = load_x(x, columns, 3, BK, BK, 1)
    back = factor(v0, v1, v2, v3, columns, eps)
    v0 *= load_x(gain, columns, 0, BK, BK, 1) + offset
    v1 *= load_x(gain, columns, 1, BK, BK, 1) + offset
    v2 *= load_x(gain, columns, 2, BK, BK, 1) + offset
    v3 *= load_x(gain, columns, 3, BK, BK, 1) + offset
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, t0, t1, t2, t3, f = whole_numbers(
        v0, v1, v2, v3, PTX
    )
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, t0, t1, t2, t3, f = spread(
        w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, t0, t1, t2, t3, f
    )
    for first in range(start, rows, step):
        coming = first + step + own
        next_row = coming * 2 + half if ACT == "clamped_swiglu" else coming + half * rows
        a_next, b_next, s_next, z_next, m_next = packed_tile(
            own_low, own_scales, own_tops, next_row, coming < readable, rows * 2, spans, there, BK, BK, STYLE, GROUP,
            UNITS, WORDS,
        )  # fmt: skip
        sums = back * row_sums(
            a, b, s, z, m, w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, t0, t1, t2, t3, f,
            STYLE, GROUP, ZERO, BF16, PTX,
        )  # fmt: skip
        if BIAS:
            sums += tl.load(bias + wide * rows * 2 + row, mask=first + own < readable, other=0.0).to(tl.float32)
        gate, up = halves_of(sums, BN)
        o = first + tl.arange(0, BN)
        tl.store(y + k * rows + o, gated(gate, up, alpha, limit, ACT).to(y.dtype.element_ty), mask=o < rows)
        a, b, s, z, m = a_next, b_next, s_next, z_next, m_next
        row = next_row


@triton.jit
def _each_piece(of_choice, TP: tl.constexpr, COUNT: tl.constexpr):
    """[TP] to [1, TP * COUNT], each COUNT times."""
    return tl.reshape(tl.broadcast_to(of_choice[:, None], [TP, COUNT]), [1, TP * COUNT])


@fast_launch
@triton.jit
def packed_token_down_kernel(
    logits, correction, slots, x, low, scales, tops, bias, extra, gate, y, most, hidden, inner, spans, low_each,
    scales_each, tops_each, scale,
    BIAS: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, TP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STYLE: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, BF16: tl.constexpr, UNITS: tl.constexpr,
    WORDS: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
    CORRECT: tl.constexpr, SCORING: tl.constexpr, TOP: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, RENORMALIZE: tl.constexpr, GP: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """``single_token_down_kernel`` of packed weights; its names. The rows of all choices, BK columns each, are one row
    of a tile, whose sums are multiplied by the choices' weights. The first tile is loaded before the kernel waits."""
    expert, rank, taken, weight = chosen(
        logits, 0, logits, correction, scale, 1, False, CORRECT, SCORING, TOP, GROUPS, EACH, TOP_GROUPS, GROUP_BEST,
        RENORMALIZE, GP, EP, False,
    )  # fmt: skip
    k = tl.arange(0, TP)
    match = taken[None, :] & (rank[None, :] == k[:, None])
    mine = tl.sum(tl.where(match, expert[None, :], 0), 1)
    share = tl.sum(tl.where(match, weight[None, :], 0.0), 1)
    slot = tl.load(slots + mine * most, mask=k < TOP, other=-1)
    of_piece = _each_piece(slot, TP, BK // PIECE)
    wide = of_piece.to(tl.int64)
    own_low = low + wide * low_each
    own_scales = scales + wide * scales_each
    own_tops = tops + wide * tops_each
    there = held_pieces(spans, UNITS, TP * BK, BK) & (of_piece >= 0)
    start = tl.program_id(0) * BN
    step = tl.num_programs(0) * BN
    n = start + tl.arange(0, BN)
    a, b, s, z, m = packed_tile(
        own_low, own_scales, own_tops, n, n < hidden, hidden, spans, there, TP * BK, BK, STYLE, GROUP, UNITS, WORDS
    )
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    v0 = load_x(x, inner, 0, TP * BK, BK, TOP)
    v1 = load_x(x, inner, 1, TP * BK, BK, TOP)
    v2 = load_x(x, inner, 2, TP * BK, BK, TOP)
    v3 = load_x(x, inner, 3, TP * BK, BK, TOP)
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, t0, t1, t2, t3, f = whole_numbers(
        v0, v1, v2, v3, PTX
    )
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, t0, t1, t2, t3, f = spread(
        w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, t0, t1, t2, t3, f
    )
    f *= _each_piece(share, TP, BK // PIECE)
    for first in range(start, hidden, step):
        coming = first + step + tl.arange(0, BN)
        a_next, b_next, s_next, z_next, m_next = packed_tile(
            own_low, own_scales, own_tops, coming, coming < hidden, hidden, spans, there, TP * BK, BK, STYLE, GROUP,
            UNITS, WORDS,
        )  # fmt: skip
        r = row_sums(
            a, b, s, z, m, w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, t0, t1, t2, t3, f,
            STYLE, GROUP, ZERO, BF16, PTX,
        )  # fmt: skip
        n = first + tl.arange(0, BN)
        inside = n < hidden
        if BIAS:
            at = slot.to(tl.int64)[None, :] * hidden + n[:, None]
            more = tl.load(bias + at, mask=(slot >= 0)[None, :] & inside[:, None], other=0.0).to(tl.float32)
            r += tl.sum(more * share[None, :], 1)
        if ADD:
            more = tl.load(extra + n, mask=inside, other=0.0).to(tl.float32)
            if GATE:
                more = more * tl.sigmoid(tl.load(gate).to(tl.float32))
            r += more
        tl.store(y + n, r.to(y.dtype.element_ty), mask=inside)
        a, b, s, z, m = a_next, b_next, s_next, z_next, m_next
