"""Products of elements of one byte: activations are rounded to the weight's kind of element, and multiplied as such.

Scales of activations are float32 [groups, tokens], or one fixed number. The weights are the left operand: matrix units
take 64 rows on the left, and few on the right; with fewer on the left they have no instruction for such elements.
"""

import triton
import triton.language as tl

from evener_kernels_triton.jit.arrival import sum_of_spans
from evener_kernels_triton.jit.elements import narrowed
from evener_kernels_triton.jit.launch import fast_launch
from evener_kernels_triton.jit.rows import activate
from evener_kernels_triton.jit.stored import row_scales


@triton.jit
def round_groups(v, fixed, KIND: tl.constexpr, CAST: tl.constexpr, FIXED: tl.constexpr, EACH: tl.constexpr):
    """(elements, scales [EACH]) of groups ``v`` [EACH, columns] in float32; FIXED: with the scale ``fixed``."""
    if FIXED:
        scale = tl.zeros([EACH], tl.float32) + tl.load(fixed)
        if CAST:
            # What is cut off anyway: infinity less infinity would be no number in ``_quotient``.
            most = tl.broadcast_to(scale[:, None] * 512.0, v.shape)
            v = tl.clamp(v, -most, most, propagate_nan=tl.PropagateNan.ALL)
    else:
        scale = _scale(tl.max(tl.abs(v), 1), KIND)
    return _nearest(_quotient(v, scale[:, None], CAST), KIND, CAST), scale


@triton.jit
def _quotient(v, scale, FAST: tl.constexpr):
    """v / scale, rounded to nearest; scales are broadcast. FAST: with one division a scale and a correction of each
    quotient by what it leaves (Markstein 1990), which rounds as well unless numbers overflow. With scales that were
    found in v none does; where v has infinity, all of the group are no numbers, and not one alone."""
    if FAST:
        inverse = tl.broadcast_to(tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), v.shape)
        near = v * inverse
        # So that a zero keeps its sign; the compiler makes 0 - x of -x, which is 0 for both.
        left = tl.fma(near, tl.broadcast_to(scale, v.shape), v * -1.0)
        y = tl.fma(left * -1.0, inverse, near)
    else:
        y = tl.div_rn(v, tl.broadcast_to(scale, v.shape))
    return y


@triton.jit
def _nearest(x, KIND: tl.constexpr, CAST: tl.constexpr):
    """``narrowed``. CAST: by the device's own instruction, which rounds and cuts off in the same way."""
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if CAST else narrowed(x, KIND)


@triton.jit
def _scale(most, KIND: tl.constexpr):
    """The scale of groups with these largest magnitudes, [groups]."""
    largest: tl.constexpr = 127.0 if KIND == "int8" else 448.0
    return tl.div_rn(tl.maximum(most, 1e-10), tl.full(most.shape, largest, tl.float32))


@triton.jit
def row_scale(x, columns, KIND: tl.constexpr, CHUNK: tl.constexpr):
    """The scale [1] of the row at ``x``, read CHUNK columns at a time."""
    at = tl.arange(0, CHUNK)
    most = tl.zeros([CHUNK], tl.float32)
    for first in range(0, columns, CHUNK):
        c = first + at
        most = tl.maximum(most, tl.abs(tl.load(x + c, mask=c < columns, other=0.0).to(tl.float32)))
    return _scale(tl.max(tl.reshape(most, [1, CHUNK]), 1), KIND)


@fast_launch
@triton.jit
def round_rows_kernel(
    x, fixed, q, scales, tokens, columns, x_row,
    KIND: tl.constexpr, CAST: tl.constexpr, FIXED: tl.constexpr, EACH: tl.constexpr, GROUP: tl.constexpr,
    WIDE: tl.constexpr, OVERLAP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """q [tokens, columns] = x divided by its scales, rounded. A program takes EACH groups of GROUP columns of one token
    (WIDE with padding); FIXED: the scale is ``fixed``, else what it finds is stored in ``scales``."""
    if OVERLAP and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if OVERLAP and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0)
    g = tl.program_id(1) * EACH + tl.arange(0, EACH)
    j = tl.arange(0, WIDE)
    c = g[:, None] * GROUP + j[None, :]
    inside = (j < GROUP)[None, :] & (c < columns)
    v = tl.load(x + token.to(tl.int64) * x_row + c, mask=inside, other=0.0).to(tl.float32)
    y, scale = round_groups(v, fixed, KIND, CAST, FIXED, EACH)
    if not FIXED:
        tl.store(scales + g * tokens + token, scale, mask=g * GROUP < columns)
    tl.store(q + token.to(tl.int64) * columns + c, y.to(q.dtype.element_ty, bitcast=True), mask=inside)


@fast_launch
@triton.jit
def round_long_rows_kernel(
    x, q, scales, columns, x_row,
    KIND: tl.constexpr, CAST: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """As ``round_rows_kernel`` with one scale a row, of a row that a program reads twice, CHUNK columns at a time: the
    second time it is in a cache. A tile of the whole row would be padded to a power of two."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0)
    row = token.to(tl.int64)
    at = tl.arange(0, CHUNK)
    scale = row_scale(x + row * x_row, columns, KIND, CHUNK)
    tl.store(scales + token + tl.arange(0, 1), scale)
    for first in range(0, columns, CHUNK):
        c = first + at
        v = tl.load(x + row * x_row + c, mask=c < columns, other=0.0).to(tl.float32)
        y = _nearest(_quotient(v, scale, CAST), KIND, CAST)
        tl.store(q + row * columns + c, y.to(q.dtype.element_ty, bitcast=True), mask=c < columns)


@fast_launch
@triton.jit
def norm_round_kernel(
    x, residual, weight, fixed, total, y, q, scales, tokens, x_row, size, eps, offset,
    ADD: tl.constexpr, KEEP: tl.constexpr, KIND: tl.constexpr, CAST: tl.constexpr, FIXED: tl.constexpr,
    SPREAD: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """As ``rms_norm_kernel``, whose names these are; what it would store in y, which is stored only with KEEP, is
    rounded in groups of WIDE columns, as ``round_rows_kernel`` does. SPREAD: a fixed scale is stored for each token."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0)
    row = token.to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + offset
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        v += tl.load(residual + row * size + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * size + at, v.to(total.dtype.element_ty), mask=inside)
    normed = (v * tl.rsqrt(tl.sum(v * v, 0) / size + eps) * w).to(y.dtype.element_ty)
    if KEEP:
        tl.store(y + row * size + at, normed, mask=inside)
    each: tl.constexpr = BLOCK // WIDE
    made, scale = round_groups(tl.reshape(normed.to(tl.float32), [each, WIDE]), fixed, KIND, CAST, FIXED, each)
    if SPREAD or not FIXED:
        g = tl.arange(0, each)
        tl.store(scales + g * tokens + token, scale, mask=g * WIDE < size)
    made = tl.reshape(made, [BLOCK])
    tl.store(q + row * size + at, made.to(q.dtype.element_ty, bitcast=True), mask=inside)


@fast_launch
@triton.jit
def act_round_kernel(
    x, fixed, q, scales, tokens, x_row, inner, y,
    ACT: tl.constexpr, KIND: tl.constexpr, CAST: tl.constexpr, FIXED: tl.constexpr, EACH: tl.constexpr,
    WIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """As ``act_and_mul_kernel``, in the dtype of y; what it would store is rounded. EACH and WIDE as in
    ``round_rows_kernel``."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0)
    row = token.to(tl.int64)
    g = tl.program_id(1) * EACH + tl.arange(0, EACH)
    c = g[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    inside = c < inner
    gate = tl.load(x + row * x_row + c, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + inner + c, mask=inside, other=0.0).to(tl.float32)
    v = (activate(gate, ACT) * up).to(y.dtype.element_ty).to(tl.float32)
    made, scale = round_groups(v, fixed, KIND, CAST, FIXED, EACH)
    if not FIXED:
        tl.store(scales + g * tokens + token, scale, mask=g * WIDE < inner)
    tl.store(q + row * inner + c, made.to(q.dtype.element_ty, bitcast=True), mask=inside)


@triton.jit
def token_scales(scales, tokens, m, there, k, columns, GROUP: tl.constexpr):
    """Scales of tokens ``m`` at column ``k``. GROUP: columns that share one; 0: all, -1: so do all tokens."""
    if GROUP < 0:
        y = tl.where(there, tl.load(scales), 0.0)
    else:
        at = scales + m
        if GROUP > 0:
            at += (k // GROUP) * tokens
        y = tl.load(at, mask=there, other=0.0)
    return y


@triton.jit
def weight_scales(w_scales, n, inside, first, k, blocks, HIGH: tl.constexpr, WIDE: tl.constexpr, SAME: tl.constexpr):
    """Scales of rows ``n`` at column ``k``. SAME: they share one, that of row ``first``."""
    if SAME:
        y = tl.load(w_scales + (first // HIGH) * blocks + k // WIDE)
    else:
        y = row_scales(w_scales, n, inside, blocks, k, HIGH, WIDE)
    return y


@triton.jit
def add_rounded(
    acc, a, b, left, right,
    WIDE: tl.constexpr, GROUP: tl.constexpr, SAME: tl.constexpr, INTEGER: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """acc + a [BN, BK] @ b [BK, BM], times ``weight_scales`` and ``token_scales`` of these columns, if columns have
    scales of their own."""
    if WIDE > 0 or GROUP > 0:
        d = tl.dot(a, b, out_dtype=tl.int32).to(tl.float32) if INTEGER else tl.dot(a, b)
        if SAME:
            acc += d * (right * left)[None, :]
        else:
            acc += d * left[:, None] * right[None, :]
    elif INTEGER:
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
    else:
        # The matrix unit itself adds such products with few bits.
        acc = tl.dot(a, b, acc, max_num_imprecise_acc=BK)
    return acc


@triton.jit
def scaled(
    acc, w_scales, x_scales, tokens, n, inside, m, there, columns, blocks,
    HIGH: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The sums of ``add_rounded`` in float32, times scales that all columns share."""
    y = acc.to(tl.float32)
    if WIDE == 0 and GROUP <= 0:
        y *= row_scales(w_scales, n, inside, blocks, 0, HIGH, WIDE)[:, None]
        y *= token_scales(x_scales, tokens, m, there, 0, columns, GROUP)[None, :]
    return y


@fast_launch
@triton.jit
def rounded_kernel(
    x, x_scales, w, w_scales, bias, y, parts, arrived, tokens, rows, columns, blocks, y_row, each,
    BIAS: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    AT_ONCE: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr, SAME: tl.constexpr,
    INTEGER: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y [tokens, rows] = x @ wᵀ for BM tokens and BN rows a program; splits as in ``skinny_kernel``. Programs that run
    at the same time take AT_ONCE tiles of tokens and few tiles of rows, so that both stay in the L2 cache."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    down = tl.cdiv(tokens, BM)
    across = tl.cdiv(rows, BN)
    place = tl.program_id(0)
    block = place // (AT_ONCE * across)
    high = tl.minimum(down - block * AT_ONCE, AT_ONCE)
    inner = place - block * (AT_ONCE * across)
    m = (block * AT_ONCE + inner % high) * BM + tl.arange(0, BM)
    first = (inner // high) * BN
    n = first + tl.arange(0, BN)
    inside = n < rows
    there = m < tokens
    start = tl.program_id(2) * each
    stop = tl.minimum(start + each, columns)
    # Rows past the end wrap around and are not stored: loads without a mask are copied faster.
    x_at = x + tl.where(there, m, 0).to(tl.int64)[:, None] * columns
    w_at = w + tl.where(inside, n, 0).to(tl.int64)[:, None] * columns
    acc = tl.zeros([BN, BM], tl.int32 if INTEGER and WIDE == 0 and GROUP <= 0 else tl.float32)
    left = tl.zeros([BN], tl.float32)
    right = tl.zeros([BM], tl.float32)
    if WIDE > 0 or GROUP > 0:
        left = weight_scales(w_scales, n, inside, first, start, blocks, HIGH, WIDE, SAME)
        right = token_scales(x_scales, tokens, m, there, start, columns, GROUP)
    for k in range(start, stop, BK):
        c = k + tl.arange(0, BK)
        if EVEN:
            a = tl.load(w_at + c[None, :])
            b = tl.load(x_at + c[None, :])
        else:
            real = (c < columns)[None, :]
            a = tl.load(w_at + c[None, :], mask=real, other=0.0)
            b = tl.load(x_at + c[None, :], mask=real, other=0.0)
        next_left = left
        next_right = right
        if WIDE > 0 or GROUP > 0:
            # Loaded before the product, and used after the next one: nothing waits for them.
            after = tl.where(k + BK < stop, k + BK, k)
            next_left = weight_scales(w_scales, n, inside, first, after, blocks, HIGH, WIDE, SAME)
            next_right = token_scales(x_scales, tokens, m, there, after, columns, GROUP)
        acc = add_rounded(acc, a, tl.trans(b), left, right, WIDE, GROUP, SAME, INTEGER, BK)
        left = next_left
        right = next_right
    sums = scaled(acc, w_scales, x_scales, tokens, n, inside, m, there, columns, blocks, HIGH, WIDE, GROUP)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    sums, finish = sum_of_spans(sums, parts, arrived, SPLITS, BN, BM)
    if finish:
        if BIAS:
            sums += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        at = m.to(tl.int64)[None, :] * y_row + n[:, None]
        tl.store(y + at, sums.to(y.dtype.element_ty), mask=there[None, :] & inside[:, None])
