"""Matrix products for few tokens, bound by reading the weights once; what stands before and after is fused in."""

import triton
import triton.language as tl

from evener_kernels_triton.jit.rows import activate


@triton.jit
def _rows(w, n, inside, c, columns, EVEN: tl.constexpr):
    """Weights [BN, BK] of rows ``n`` and columns ``c``; nobody reads them twice."""
    at = w + n[:, None] * columns + c[None, :]
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=inside[:, None] & (c < columns)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _take(
    x, residual, total, gain, a, u, c, columns, offset, acc, high, squares,
    ADD: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The sums after columns ``c``, whose weights are ``a`` (and ``u`` for the up rows)."""
    real = c < columns
    b = tl.load(x + c).to(tl.float32) if EVEN else tl.load(x + c, mask=real, other=0.0).to(tl.float32)
    if ADD:
        b += tl.load(residual + c, mask=real, other=0.0).to(tl.float32)
        if tl.program_id(0) == 0:
            tl.store(total + c, b.to(total.dtype.element_ty), mask=real)
    if NORM:
        squares += b * b
        b = b * (tl.load(gain + c, mask=real, other=0.0).to(tl.float32) + offset)
    acc += a.to(tl.float32) * b[None, :]
    if ACT != "":
        high += u.to(tl.float32) * b[None, :]
    return acc, high, squares


@triton.jit
def gemv_kernel(
    x, residual, total, gain, w, bias, addend, y, rows, columns, eps, offset,
    ADD: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, SUM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, TWO: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token: y = w @ x, BN rows of w [rows, columns] a program.

    ADD: x + residual stands for x, and goes to ``total``. NORM: that is normalised by root mean square; the factor is
    one for all columns, so it is applied to the sums. ACT: w has the up rows behind the gate rows. SUM: ``addend``
    [rows] is added, in float32; it may be y. TWO: there is more than one tile of columns.

    The weights of two tiles are under way before the kernel waits for the one that makes x: they do not depend on it.
    """
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
    squares = tl.zeros([BK], tl.float32)
    acc, high, squares = _take(
        x, residual, total, gain, a0, u0, c, columns, offset, acc, high, squares, ADD, NORM, ACT, EVEN
    )
    if TWO:
        acc, high, squares = _take(
            x, residual, total, gain, a1, u1, BK + c, columns, offset, acc, high, squares, ADD, NORM, ACT, EVEN
        )
        for k in range(2 * BK, columns, BK):
            a = _rows(w, wide, inside, k + c, columns, EVEN)
            u = a
            if ACT != "":
                u = _rows(w, up_rows, inside, k + c, columns, EVEN)
            acc, high, squares = _take(
                x, residual, total, gain, a, u, k + c, columns, offset, acc, high, squares, ADD, NORM, ACT, EVEN
            )
    r = tl.sum(acc, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / columns + eps)
        r = r * scale
    if BIAS:
        r += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if ACT != "":
        up = tl.sum(high, 1)
        if NORM:
            up = up * scale
        if BIAS:
            up += tl.load(bias + rows + n, mask=inside, other=0.0).to(tl.float32)
        r = activate(r, ACT) * up
    if SUM:
        r += tl.load(addend + n, mask=inside, other=0.0)
    tl.store(y + n, r.to(y.dtype.element_ty), mask=inside)


@triton.jit
def skinny_kernel(
    x, w, bias, addend, y, tokens, rows, columns, x_row, y_row,
    BIAS: tl.constexpr, ACT: tl.constexpr, SUM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Up to BM tokens: yᵀ = w @ xᵀ, BN rows of w a program. The weights are the left side of the product: matrix units
    take 64 rows on the left, and on the right as few as there are. ACT, BIAS and SUM as in ``gemv_kernel``."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    inside = n < rows
    there = m < tokens
    m_wide = m.to(tl.int64)
    n_wide = n.to(tl.int64)
    acc = tl.zeros([BN, BM], tl.float32)
    high = tl.zeros([BN, BM], tl.float32)
    for k in range(0, columns, BK):
        c = k + tl.arange(0, BK)
        if EVEN:
            b = tl.load(x + m_wide[None, :] * x_row + c[:, None], mask=there[None, :], other=0.0)
        else:
            b = tl.load(
                x + m_wide[None, :] * x_row + c[:, None], mask=there[None, :] & (c < columns)[:, None], other=0.0
            )
        acc = tl.dot(_rows(w, n_wide, inside, c, columns, EVEN), b, acc, input_precision=PRECISION)
        if ACT != "":
            high = tl.dot(_rows(w, n_wide + rows, inside, c, columns, EVEN), b, high, input_precision=PRECISION)
    # Dependents that came earlier would take the place of programs that still read.
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if BIAS:
        acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    if ACT != "":
        if BIAS:
            high += tl.load(bias + rows + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        acc = activate(acc, ACT) * high
    at = m_wide[None, :] * y_row + n[:, None]
    mask = there[None, :] & inside[:, None]
    if SUM:
        acc += tl.load(addend + at, mask=mask, other=0.0)
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=mask)
