"""Matrix products for few tokens, bound by reading the weights once; the ops before and after are fused."""

import triton
import triton.language as tl

from evener_kernels_triton.jit.arrival import sum_of_spans
from evener_kernels_triton.jit.launch import fast_launch
from evener_kernels_triton.jit.rows import activate
from evener_kernels_triton.jit.stored import STEP, dropped, fours, lifted, step_scales, step_sums


@triton.jit
def _rows(w, n, inside, c, columns, EVEN: tl.constexpr):
    """Load weights [BN, BK] of rows ``n`` and columns ``c``, which are read only once."""
    at = w + n[:, None] * columns + c[None, :]
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=inside[:, None] & (c < columns)[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def tile(
    w, scales, n, inside, k, columns, blocks,
    KIND: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """BK columns from ``k`` of rows ``n``, and their scales. Stored elements are read four to a word."""
    if KIND == "":
        a = _rows(w, n, inside, k + tl.arange(0, BK), columns, EVEN)
        s = n
    else:
        a = _rows(w, n, inside, k // 4 + tl.arange(0, BK // 4), columns // 4, EVEN)
        s = step_scales(scales, n, inside, blocks, k, HIGH, WIDE, BK)
    return a, s


@triton.jit
def row_sums(a, s, b, b1, b2, b3, KIND: tl.constexpr, CAST: tl.constexpr):
    """Sums over columns of a tile's weights times its scales and ``parts_of`` x."""
    if KIND == "":
        r = tl.sum(a.to(tl.float32) * b[None, :], 1)
    else:
        sums = step_sums(a, b[None, :], b1[None, :], b2[None, :], b3[None, :], KIND, CAST)
        r = dropped(tl.sum(sums * s, 1), KIND, CAST)
    return r


@triton.jit
def parts_of(b, KIND: tl.constexpr, CAST: tl.constexpr):
    """float32 x [BK] as ``row_sums`` takes it."""
    if KIND == "":
        b0, b1, b2, b3 = b, b, b, b
    else:
        b0, b1, b2, b3 = fours(lifted(b, KIND, CAST))
    return b0, b1, b2, b3


@fast_launch
@triton.jit
def persistent_gemv_kernel(
    x, residual, total, gain, w, scales, bias, y, rows, columns, blocks, eps, offset,
    ADD: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    OVERLAP: tl.constexpr, KIND: tl.constexpr, CAST: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One token, rows of at most BK columns: y = w @ x. A program loops over tiles of BN rows of w [rows, columns]
    and prepares x once.

    ADD: x + residual is used for x, and stored in ``total``. NORM: it is normalised by root mean square. ACT: w has the
    up rows after the gate rows. KIND and what follows: as ``jit.stored`` says; "": w is plain numbers.

    The first rows are loaded before the kernel waits for the one that computes x, and each next tile before the current
    one is summed.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    c = tl.arange(0, BK)
    real = c < columns
    step = tl.num_programs(0) * BN
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < rows
    a, s = tile(w, scales, n.to(tl.int64), inside, 0, columns, blocks, KIND, HIGH, WIDE, BK, False)
    u, t = a, s
    if ACT != "":
        u, t = tile(w, scales, n.to(tl.int64) + rows, inside, 0, columns, blocks, KIND, HIGH, WIDE, BK, False)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    b = tl.load(x + c, mask=real, other=0.0).to(tl.float32)
    if ADD:
        b += tl.load(residual + c, mask=real, other=0.0).to(tl.float32)
        if tl.program_id(0) == 0:
            tl.store(total + c, b.to(total.dtype.element_ty), mask=real)
    if NORM:
        scale = tl.rsqrt(tl.sum(b * b, 0) / columns + eps)
        b = b * (tl.load(gain + c, mask=real, other=0.0).to(tl.float32) + offset) * scale
    b, b1, b2, b3 = parts_of(b, KIND, CAST)
    for first in range(tl.program_id(0) * BN, rows, step):
        coming = first + step + tl.arange(0, BN)
        there = coming < rows
        wide = coming.to(tl.int64)
        a_next, s_next = tile(w, scales, wide, there, 0, columns, blocks, KIND, HIGH, WIDE, BK, False)
        u_next, t_next = a_next, s_next
        if ACT != "":
            u_next, t_next = tile(w, scales, wide + rows, there, 0, columns, blocks, KIND, HIGH, WIDE, BK, False)
        n = first + tl.arange(0, BN)
        inside = n < rows
        r = row_sums(a, s, b, b1, b2, b3, KIND, CAST)
        if BIAS:
            r += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
        if ACT != "":
            up = row_sums(u, t, b, b1, b2, b3, KIND, CAST)
            if BIAS:
                up += tl.load(bias + rows + n, mask=inside, other=0.0).to(tl.float32)
            r = activate(r, ACT) * up
        tl.store(y + n, r.to(y.dtype.element_ty), mask=inside)
        a = a_next
        s = s_next
        u = u_next
        t = t_next


@triton.jit
def _take(x, a, u, c, columns, acc, high, ACT: tl.constexpr, EVEN: tl.constexpr):
    """Add columns ``c``, whose weights are ``a`` (and ``u`` for the up rows), to the sums."""
    b = tl.load(x + c).to(tl.float32) if EVEN else tl.load(x + c, mask=c < columns, other=0.0).to(tl.float32)
    acc += a.to(tl.float32) * b[None, :]
    if ACT != "":
        high += u.to(tl.float32) * b[None, :]
    return acc, high


@fast_launch
@triton.jit
def gemv_kernel(
    x, w, bias, y, rows, columns,
    BIAS: tl.constexpr, ACT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, TWO: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token, rows of any length: BN rows of w for each program, BK columns at a time. ACT as in
    ``persistent_gemv_kernel``. TWO: there is more than one tile of columns; two are loaded before the kernel waits."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < rows
    wide = n.to(tl.int64)
    up_rows = wide + rows
    c = tl.arange(0, BK)
    a0 = _rows(w, wide, inside, c, columns, EVEN)
    u0 = a0
    if ACT != "":
        u0 = _rows(w, up_rows, inside, c, columns, EVEN)
    if TWO:
        a1 = _rows(w, wide, inside, BK + c, columns, EVEN)
        u1 = a1
        if ACT != "":
            u1 = _rows(w, up_rows, inside, BK + c, columns, EVEN)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BN, BK], tl.float32)
    high = tl.zeros([BN, BK], tl.float32)
    acc, high = _take(x, a0, u0, c, columns, acc, high, ACT, EVEN)
    if TWO:
        acc, high = _take(x, a1, u1, BK + c, columns, acc, high, ACT, EVEN)
        for k in range(2 * BK, columns, BK):
            a = _rows(w, wide, inside, k + c, columns, EVEN)
            u = a
            if ACT != "":
                u = _rows(w, up_rows, inside, k + c, columns, EVEN)
            acc, high = _take(x, a, u, k + c, columns, acc, high, ACT, EVEN)
    r = tl.sum(acc, 1)
    if BIAS:
        r += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if ACT != "":
        up = tl.sum(high, 1)
        if BIAS:
            up += tl.load(bias + rows + n, mask=inside, other=0.0).to(tl.float32)
        r = activate(r, ACT) * up
    tl.store(y + n, r.to(y.dtype.element_ty), mask=inside)


@fast_launch
@triton.jit
def stored_gemv_kernel(
    x, w, scales, bias, y, rows, columns, blocks,
    BIAS: tl.constexpr, ACT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    OVERLAP: tl.constexpr, KIND: tl.constexpr, CAST: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``gemv_kernel`` of weights of one byte an element: two tiles of columns are under way while one is summed."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < rows
    wide = n.to(tl.int64)
    c = tl.arange(0, BK)
    a, s = tile(w, scales, wide, inside, 0, columns, blocks, KIND, HIGH, WIDE, BK, EVEN)
    a_next, s_next = tile(w, scales, wide, inside, BK, columns, blocks, KIND, HIGH, WIDE, BK, False)
    u, t, u_next, t_next = a, s, a_next, s_next
    if ACT != "":
        u, t = tile(w, scales, wide + rows, inside, 0, columns, blocks, KIND, HIGH, WIDE, BK, EVEN)
        u_next, t_next = tile(w, scales, wide + rows, inside, BK, columns, blocks, KIND, HIGH, WIDE, BK, False)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BN, BK // STEP], tl.float32)
    high = acc
    for k in range(0, columns, BK):
        after = k + 2 * BK
        a_last, s_last = tile(w, scales, wide, inside, after, columns, blocks, KIND, HIGH, WIDE, BK, False)
        u_last, t_last = a_last, s_last
        if ACT != "":
            u_last, t_last = tile(w, scales, wide + rows, inside, after, columns, blocks, KIND, HIGH, WIDE, BK, False)
        b = tl.load(x + k + c) if EVEN else tl.load(x + k + c, mask=k + c < columns, other=0.0)
        b0, b1, b2, b3 = fours(lifted(b.to(tl.float32), KIND, CAST)[None, :])
        acc += step_sums(a, b0, b1, b2, b3, KIND, CAST) * s
        if ACT != "":
            high += step_sums(u, b0, b1, b2, b3, KIND, CAST) * t
        a, s, a_next, s_next = a_next, s_next, a_last, s_last
        u, t, u_next, t_next = u_next, t_next, u_last, t_last
    r = dropped(tl.sum(acc, 1), KIND, CAST)
    if BIAS:
        r += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if ACT != "":
        up = dropped(tl.sum(high, 1), KIND, CAST)
        if BIAS:
            up += tl.load(bias + rows + n, mask=inside, other=0.0).to(tl.float32)
        r = activate(r, ACT) * up
    tl.store(y + n, r.to(y.dtype.element_ty), mask=inside)


@fast_launch
@triton.jit
def skinny_kernel(
    x, w, bias, y, parts, arrived, tokens, rows, columns, x_row, y_row, each,
    BIAS: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Up to BM tokens: yᵀ = w @ xᵀ, BN rows of w for each program. The weights are the left operand: matrix units take
    64 rows on the left, and few on the right.

    With few rows there are fewer programs than units, so columns are split into SPLITS spans of ``each``. A program
    stores its sums in ``parts``; the last to finish adds them in column order, so the result does not depend on timing.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    inside = n < rows
    there = m < tokens
    m_wide = m.to(tl.int64)
    n_wide = n.to(tl.int64)
    part = tl.program_id(2)
    acc = tl.zeros([BN, BM], tl.float32)
    for k in range(part * each, tl.minimum(part * each + each, columns), BK):
        c = k + tl.arange(0, BK)
        if EVEN:
            b = tl.load(x + m_wide[None, :] * x_row + c[:, None], mask=there[None, :], other=0.0)
        else:
            b = tl.load(
                x + m_wide[None, :] * x_row + c[:, None], mask=there[None, :] & (c < columns)[:, None], other=0.0
            )
        acc = tl.dot(_rows(w, n_wide, inside, c, columns, EVEN), b, acc, input_precision=PRECISION)
    # Dependents that start earlier would occupy units that this launch still needs.
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    acc, finish = sum_of_spans(acc, parts, arrived, SPLITS, BN, BM)
    if finish:
        if BIAS:
            acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        at = m_wide[None, :] * y_row + n[:, None]
        tl.store(y + at, acc.to(y.dtype.element_ty), mask=there[None, :] & inside[:, None])
