"""Matrix products for few tokens, bound by reading the weights once; the ops before and after are fused."""

import triton
import triton.language as tl

from evener_kernels_triton.jit.arrival import sum_of_spans
from evener_kernels_triton.jit.launch import fast_launch
from evener_kernels_triton.jit.rows import activate


@triton.jit
def _rows(w, n, inside, c, columns, EVEN: tl.constexpr):
    """Load weights [BN, BK] of rows ``n`` and columns ``c``, which are read only once."""
    at = w + n[:, None] * columns + c[None, :]
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=inside[:, None] & (c < columns)[None, :], other=0.0, eviction_policy="evict_first")


@fast_launch
@triton.jit
def persistent_gemv_kernel(
    x, residual, total, gain, w, bias, y, rows, columns, eps, offset,
    ADD: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token, rows of at most BK columns: y = w @ x. A program loops over tiles of BN rows of w [rows, columns]
    and prepares x once.

    ADD: x + residual is used for x, and stored in ``total``. NORM: it is normalised by root mean square. ACT: w has the
    up rows after the gate rows.

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
    a = _rows(w, n.to(tl.int64), inside, c, columns, False)
    u = a
    if ACT != "":
        u = _rows(w, n.to(tl.int64) + rows, inside, c, columns, False)
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
    for first in range(tl.program_id(0) * BN, rows, step):
        coming = first + step + tl.arange(0, BN)
        a_next = _rows(w, coming.to(tl.int64), coming < rows, c, columns, False)
        u_next = a_next
        if ACT != "":
            u_next = _rows(w, coming.to(tl.int64) + rows, coming < rows, c, columns, False)
        n = first + tl.arange(0, BN)
        inside = n < rows
        r = tl.sum(a.to(tl.float32) * b[None, :], 1)
        if BIAS:
            r += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
        if ACT != "":
            up = tl.sum(u.to(tl.float32) * b[None, :], 1)
            if BIAS:
                up += tl.load(bias + rows + n, mask=inside, other=0.0).to(tl.float32)
            r = activate(r, ACT) * up
        tl.store(y + n, r.to(y.dtype.element_ty), mask=inside)
        a = a_next
        u = u_next


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
