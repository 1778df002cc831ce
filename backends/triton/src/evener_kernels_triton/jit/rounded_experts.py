"""Products of rounded activations with matrices of a stack, for pairs that are listed by matrix."""

import triton
import triton.language as tl

from evener_kernels_triton.jit.experts import gated
from evener_kernels_triton.jit.launch import fast_launch
from evener_kernels_triton.jit.rounded import add_rounded, scaled, token_scales, weight_scales


@triton.jit
def _columns(at, c, columns, EVEN: tl.constexpr):
    """Columns ``c`` of the rows at ``at``."""
    return tl.load(at + c[None, :]) if EVEN else tl.load(at + c[None, :], mask=(c < columns)[None, :], other=0.0)


@fast_launch
@triton.jit
def rounded_grouped_kernel(
    x, x_scales, w, w_scales, bias, y, lists, counts, experts, tokens, room, rows, columns, blocks, scale_each, y_row,
    alpha, limit,
    TOP: tl.constexpr, SHARE: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    GROUP: tl.constexpr, SAME: tl.constexpr, INTEGER: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """As ``grouped_large_kernel``, whose names and tiles these are; x and its scales have ``tokens`` rows. Gate and up
    are two products of one tile of x."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    halves: tl.constexpr = 1 if ACT == "" else 2
    across = tl.cdiv(rows, BN)
    tile = tl.program_id(0) // across
    first = (tl.program_id(0) % across) * BN
    e = tl.arange(0, EP)
    each = tl.load(counts + e, mask=e < experts, other=0)
    tiles = tl.cdiv(each, BM)
    ends = tl.cumsum(tiles, 0)
    matrix = tl.sum((ends <= tile).to(tl.int32), 0)
    if matrix < experts:
        mine = e == matrix
        p = (tile - tl.sum(tl.where(mine, ends - tiles, 0), 0)) * BM + tl.arange(0, BM)
        there = p < tl.sum(tl.where(mine, each, 0), 0)
        pair = tl.load(lists + matrix.to(tl.int64) * room + p, mask=there, other=0)
        n = first + tl.arange(0, BN)
        inside = n < rows
        # Rows past the end wrap around and are not stored: loads without a mask are copied faster.
        safe = tl.where(inside, n, 0)
        gate_row = safe * 2 if ACT == "clamped_swiglu" else safe
        up_row = safe * 2 + 1 if ACT == "clamped_swiglu" else rows + safe
        own = w + matrix.to(tl.int64) * rows * halves * columns
        own_scales = w_scales + matrix.to(tl.int64) * scale_each
        m = pair // TOP if SHARE else pair
        x_at = x + m.to(tl.int64)[:, None] * columns
        gate_at = own + gate_row.to(tl.int64)[:, None] * columns
        up_at = own + up_row.to(tl.int64)[:, None] * columns
        acc = tl.zeros([BN, BM], tl.int32 if INTEGER and WIDE == 0 and GROUP <= 0 else tl.float32)
        high = acc
        right = tl.zeros([BM], tl.float32)
        left = 0.0 if SAME else tl.zeros([BN], tl.float32)
        left_up = left
        if WIDE > 0 or GROUP > 0:
            right = token_scales(x_scales, tokens, m, there, 0, columns, GROUP)
            left = weight_scales(own_scales, gate_row, inside, first, 0, blocks, HIGH, WIDE, SAME)
            if ACT != "":
                left_up = weight_scales(own_scales, up_row, inside, rows + first, 0, blocks, HIGH, WIDE, SAME)
        for k in range(0, columns, BK):
            c = k + tl.arange(0, BK)
            b = tl.trans(_columns(x_at, c, columns, EVEN))
            a = _columns(gate_at, c, columns, EVEN)
            next_right = right
            next_left = left
            next_up = left_up
            if WIDE > 0 or GROUP > 0:
                # Loaded before the product, and used after the next one: nothing waits for them.
                after = tl.where(k + BK < columns, k + BK, k)
                next_right = token_scales(x_scales, tokens, m, there, after, columns, GROUP)
                next_left = weight_scales(own_scales, gate_row, inside, first, after, blocks, HIGH, WIDE, SAME)
                if ACT != "":
                    next_up = weight_scales(own_scales, up_row, inside, rows + first, after, blocks, HIGH, WIDE, SAME)
            acc = add_rounded(acc, a, b, left, right, WIDE, GROUP, SAME, INTEGER, BK)
            if ACT != "":
                u = _columns(up_at, c, columns, EVEN)
                high = add_rounded(high, u, b, left_up, right, WIDE, GROUP, SAME, INTEGER, BK)
            right = next_right
            left = next_left
            left_up = next_up
        sums = scaled(acc, own_scales, x_scales, tokens, gate_row, inside, m, there, columns, blocks, HIGH, WIDE, GROUP)
        own_bias = bias + matrix.to(tl.int64) * rows * halves
        if BIAS:
            sums += tl.load(own_bias + gate_row).to(tl.float32)[:, None]
        if ACT != "":
            up = scaled(
                high, own_scales, x_scales, tokens, up_row, inside, m, there, columns, blocks, HIGH, WIDE, GROUP
            )
            if BIAS:
                up += tl.load(own_bias + up_row).to(tl.float32)[:, None]
            sums = gated(sums, up, alpha, limit, ACT)
        at = y + pair.to(tl.int64)[None, :] * y_row + n[:, None]
        tl.store(at, sums.to(y.dtype.element_ty), mask=there[None, :] & inside[:, None])
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
