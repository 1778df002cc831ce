"""Matrix products for few tokens, bound by reading the weights once, with what stands before and after them fused in."""

import triton
import triton.language as tl

from evener_kernels_triton.jit.rows import activate


@triton.jit
def gemv_kernel(
    x, residual, total, gain, w, bias, addend, y, rows, columns, eps, offset,
    ADD: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, SUM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token: y = w @ x, BN rows of w [rows, columns] a program.

    ADD: x + residual stands for x, and goes to ``total``. NORM: that is normalised by root mean square; the factor is
    one for all columns, so it is applied to the sums. ACT: w has the up rows behind the gate rows. SUM: ``addend`` [rows]
    is added, in float32; it may be y.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < rows
    acc = tl.zeros([BN, BK], tl.float32)
    if ACT != "":
        high = tl.zeros([BN, BK], tl.float32)
    if NORM:
        squares = tl.zeros([BK], tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n_wide = n.to(tl.int64)
    for k in range(0, columns, BK):
        c = k + tl.arange(0, BK)
        real = c < columns
        if EVEN:
            a = tl.load(w + n_wide[:, None] * columns + c[None, :], eviction_policy="evict_first")
            b = tl.load(x + c).to(tl.float32)
        else:
            a = tl.load(
                w + n_wide[:, None] * columns + c[None, :], mask=inside[:, None] & real[None, :], other=0.0,
                eviction_policy="evict_first",
            )  # fmt: skip
            b = tl.load(x + c, mask=real, other=0.0).to(tl.float32)
        if ADD:
            b += tl.load(residual + c, mask=real, other=0.0).to(tl.float32)
            if tl.program_id(0) == 0:
                tl.store(total + c, b.to(total.dtype.element_ty), mask=real)
        if NORM:
            squares += b * b
            b = b * (tl.load(gain + c, mask=real, other=0.0).to(tl.float32) + offset)
        acc += a.to(tl.float32) * b[None, :]
        if ACT != "":
            u = tl.load(
                w + (n_wide + rows)[:, None] * columns + c[None, :], mask=inside[:, None] & real[None, :], other=0.0,
                eviction_policy="evict_first",
            )  # fmt: skip
            high += u.to(tl.float32) * b[None, :]
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
    """Up to BM tokens: y = x @ wᵀ, BN rows of w a program. ACT, BIAS and SUM as in ``gemv_kernel``."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    inside = n < rows
    there = m < tokens
    m_wide = m.to(tl.int64)
    n_wide = n.to(tl.int64)
    acc = tl.zeros([BM, BN], tl.float32)
    if ACT != "":
        high = tl.zeros([BM, BN], tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for k in range(0, columns, BK):
        c = k + tl.arange(0, BK)
        if EVEN:
            a = tl.load(x + m_wide[:, None] * x_row + c[None, :], mask=there[:, None], other=0.0)
            b = tl.load(w + n_wide[None, :] * columns + c[:, None], eviction_policy="evict_first")
            if ACT != "":
                u = tl.load(w + (n_wide + rows)[None, :] * columns + c[:, None], eviction_policy="evict_first")
        else:
            real = c < columns
            a = tl.load(x + m_wide[:, None] * x_row + c[None, :], mask=there[:, None] & real[None, :], other=0.0)
            b = tl.load(w + n_wide[None, :] * columns + c[:, None], mask=inside[None, :] & real[:, None], other=0.0)
            if ACT != "":
                u = tl.load(
                    w + (n_wide + rows)[None, :] * columns + c[:, None], mask=inside[None, :] & real[:, None], other=0.0
                )
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if ACT != "":
            high = tl.dot(a, u, high, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    if ACT != "":
        if BIAS:
            high += tl.load(bias + rows + n, mask=inside, other=0.0).to(tl.float32)[None, :]
        acc = activate(acc, ACT) * high
    at = m_wide[:, None] * y_row + n[None, :]
    mask = there[:, None] & inside[None, :]
    if SUM:
        acc += tl.load(addend + at, mask=mask, other=0.0)
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=mask)
