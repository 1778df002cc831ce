"""Weights of two to eight bits an element, packed: bits to numbers, and scales onto numbers or sums.

A matrix is cut into spans of 128 * UNITS columns. Its arrays are [spans, rows, …], so that a program's rows of a span
are one piece of memory. The numbers of 128 columns are four tiles of 32. A word of 16 bits of ``low`` has one number of
each tile, four bits each; or of eight tiles, two bits each; or of two tiles, eight bits each. ``high`` has further bits
of eight tiles, one (in bytes) or two (in words). ``scales`` are words of 32 bits, whose meaning STYLE says, and
``tops`` one number, or two, that all scales of a row's span are multiplied with; with the style "e4m3" one number that
all sums of a row are multiplied with; with the kind "table" [rows / 32, 32], ``tables.table_words`` for 32 rows each.
"""

import triton
import triton.language as tl

from evener_kernels_triton.jit.arrival import sum_of_spans
from evener_kernels_triton.jit.launch import fast_launch
from evener_kernels_triton.jit.packed_numbers import numbers_of

#: (number + $2) * $3 + $4, for two at a time; $2 is whole, so the first sum is exact.
_SCALE_BF16 = tl.constexpr("""
{
.reg .b32 t, one;
mov.b32 one, 0x3F803F80;
fma.rn.bf16x2 t, $1, one, $2;
fma.rn.bf16x2 $0, t, $3, $4;
}
""")
#: The same of a number alone.
_TIMES_BF16 = tl.constexpr("""
{
.reg .b32 zero;
mov.b32 zero, 0x80008000;
fma.rn.bf16x2 $0, $1, $2, zero;
}
""")
_SCALE_F16 = tl.constexpr(_SCALE_BF16.value.replace("bf16x2", "f16x2").replace("0x3F803F80", "0x3C003C00"))


@triton.jit
def _as_float(bits, BF16: tl.constexpr):
    """The lower 16 bits of a word as a number; upper ones must be zero."""
    if BF16:
        y = (bits << 16).to(tl.float32, bitcast=True)
    else:
        y = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return y


@triton.jit
def _float8(word, i: tl.constexpr):
    """The i-th byte of words, an E4M3 number without a sign, in float32 times 2^-120. NaN is none."""
    bits = word << (20 - 8 * i) if i < 3 else word >> 4
    return (bits & 0x7F00000).to(tl.float32, bitcast=True)


@triton.jit
def _table_words(tops, n, rows, KIND: tl.constexpr, PTX: tl.constexpr):
    """[rows, 1]: where the words of each row's table begin, and those that have it as bfloat16, if there are tables.
    With PTX the latter are read, else the former."""
    at = (tops + n * 0)[:, None]
    h0 = (n * 0)[:, None]
    h1, h2, h3, l0, l1, l2, l3 = h0, h0, h0, h0, h0, h0, h0
    if KIND == "table":
        # A table stands for 32 rows and has 32 words.
        at = (tops + (tl.minimum(n, rows - 1) & -32))[:, None]
        if PTX:
            h0, h1, h2, h3 = tl.load(at + 24), tl.load(at + 25), tl.load(at + 26), tl.load(at + 27)
            l0, l1, l2, l3 = tl.load(at + 28), tl.load(at + 29), tl.load(at + 30), tl.load(at + 31)
    return at, h0, h1, h2, h3, l0, l1, l2, l3


@triton.jit
def _pair(scales, mask, top, least, u, STYLE: tl.constexpr, GROUP: tl.constexpr, BF16: tl.constexpr):
    """(scale, what is added, zero point) of the first tile of 64 columns, ``u``, then of the second, in float32."""
    none = tl.zeros(top.shape, tl.float32)
    m0, m1, z0, z1 = none, none, none, none
    if STYLE == "super":
        v = tl.load(scales + u, mask=mask, other=0)
        s0 = (v & 255).to(tl.float32) * top
        m0 = ((v >> 8) & 255).to(tl.float32) * least
        s1 = ((v >> 16) & 255).to(tl.float32) * top
        m1 = ((v >> 24) & 255).to(tl.float32) * least
    elif STYLE == "power":
        v = tl.load(scales + u // 2, mask=mask, other=0)
        s0 = tl.maximum(((v >> (16 * (u % 2))) & 255) << 23, 0x400000).to(tl.float32, bitcast=True)
        s1 = tl.maximum(((v >> (16 * (u % 2) + 8)) & 255) << 23, 0x400000).to(tl.float32, bitcast=True)
    elif STYLE == "float":
        at = 2 * u if GROUP == 32 else 64 * u // GROUP
        s0 = tl.load(scales + at, mask=mask, other=0).to(tl.float32, bitcast=True)
        s1 = s0
        if GROUP == 32:
            s1 = tl.load(scales + at + 1, mask=mask, other=0).to(tl.float32, bitcast=True)
    elif STYLE == "half" and GROUP == 32:
        v = tl.load(scales + u, mask=mask, other=0)
        s0 = _as_float(v & 0xFFFF, BF16)
        s1 = _as_float((v >> 16) & 0xFFFF, BF16)
    elif STYLE == "half":
        g = 64 * u // GROUP
        v = tl.load(scales + g // 2, mask=mask, other=0)
        s0 = _as_float((v >> (16 * (g % 2))) & 0xFFFF, BF16)
        s1 = s0
    else:
        first = 2 * u if GROUP == 32 else 64 * u // GROUP
        v = tl.load(scales + first, mask=mask, other=0)
        s0 = _as_float(v & 0xFFFF, BF16)
        w = v
        s1 = s0
        if GROUP == 32:
            w = tl.load(scales + first + 1, mask=mask, other=0)
            s1 = _as_float(w & 0xFFFF, BF16)
        if STYLE == "zero":
            z0 = (v >> 16).to(tl.float32)
            z1 = (w >> 16).to(tl.float32)
        else:
            m0 = _as_float((v >> 16) & 0xFFFF, BF16)
            m1 = _as_float((w >> 16) & 0xFFFF, BF16)
    return s0, m0, z0, s1, m1, z1


@triton.jit
def _quad(scales, mask, top, least, u, i: tl.constexpr, STYLE: tl.constexpr):
    """(scale, what is added) of the i-th 16 columns of 64 columns, ``u``."""
    v = tl.load(scales + u, mask=mask, other=0)
    if STYLE == "signed":
        s = ((v << (24 - 8 * i)) >> 24).to(tl.float32) * top
        m = tl.zeros(top.shape, tl.float32)
    else:
        s = ((v >> (8 * i)) & 15).to(tl.float32) * top
        m = ((v >> (8 * i + 4)) & 15).to(tl.float32) * least
    return s, m


@triton.jit
def _scaled(number, minus, scale, more, PTX: tl.constexpr, PLAIN: tl.constexpr = False):
    """(number + minus) * scale + more, in the dtype of ``number``; the others are float32 and are spread to it. PLAIN:
    nothing is added."""
    to: tl.constexpr = number.dtype
    if PLAIN:
        y = _times(number, scale, PTX)
    elif PTX and to == tl.bfloat16:
        minus, _ = tl.broadcast(minus.to(to), number)
        scale, _ = tl.broadcast(scale.to(to), number)
        more, _ = tl.broadcast(more.to(to), number)
        y = tl.inline_asm_elementwise(
            _SCALE_BF16, "=r,r,r,r,r", [number, minus, scale, more], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif PTX and to == tl.float16:
        minus, _ = tl.broadcast(minus.to(to), number)
        scale, _ = tl.broadcast(scale.to(to), number)
        more, _ = tl.broadcast(more.to(to), number)
        y = tl.inline_asm_elementwise(
            _SCALE_F16, "=r,r,r,r,r", [number, minus, scale, more], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        y = ((number.to(tl.float32) + minus) * scale + more).to(to)
    return y


@triton.jit
def _times(number, scale, PTX: tl.constexpr):
    """number * scale, in the dtype of ``number``; ``scale`` is float32 and is spread to it."""
    to: tl.constexpr = number.dtype
    if PTX and to == tl.bfloat16:
        scale, _ = tl.broadcast(scale.to(to), number)
        y = tl.inline_asm_elementwise(_TIMES_BF16, "=r,r,r", [number, scale], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        y = (number.to(tl.float32) * scale).to(to)
    return y


@triton.jit
def _fetch(low, row, LOW: tl.constexpr):
    """Have the L2 cache read rows of ``low``, which are at most 256 bytes long, ahead of their use."""
    at = low + row * LOW
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
    if LOW > 64:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [(at + 64).to(tl.int64)], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@triton.jit
def _places(low, high, scales, tops, row, j, LOW: tl.constexpr, HIGH: tl.constexpr, WORDS: tl.constexpr):
    """Where the arrays of rows ``row`` of [spans * rows] begin; of ``low`` and ``high`` the elements ``j``."""
    return (
        low + row[:, None] * LOW + j[None, :], high + row[:, None] * HIGH + j[None, :], scales + row * WORDS, tops + row
    )  # fmt: skip


@triton.jit
def _tops(at, inside, BN: tl.constexpr, STYLE: tl.constexpr, BF16: tl.constexpr):
    """(scale of scales, that of minima with its sign turned) [BN], in float32; zeros where there are none."""
    top = tl.zeros([BN], tl.float32)
    least = top
    if STYLE == "signed":
        top = tl.load(at, mask=inside, other=0).to(tl.float32)
    elif STYLE == "super" or STYLE == "least":
        both = tl.load(at, mask=inside, other=0)
        least = -_as_float((both >> 16) & 0xFFFF, BF16)
        top = _as_float(both & 0xFFFF, BF16)
    return top, least


@triton.jit
def _next_words(low_at, high_at, inside, w, h, u: tl.constexpr, KIND: tl.constexpr):
    """Words whose first bits belong to unit ``u``: of ``low``; for eight bits of its other two tiles, else of ``high``.
    ``w`` and ``h`` are those of the unit before."""
    held = inside[:, None]
    if KIND == "q8":
        w = tl.load(low_at + u * 64, mask=held, other=0)
    elif KIND == "q2" or KIND == "q3":
        w = tl.load(low_at, mask=held, other=0) if u == 0 else w >> 8
    else:
        w = tl.load(low_at + u * 32, mask=held, other=0)
    if KIND == "q8":
        h = tl.load(low_at + (u * 64 + 32), mask=held, other=0)
    elif KIND == "q6":
        h = tl.load(high_at, mask=held, other=0) if u == 0 else h >> 8
    elif KIND == "q3" or KIND == "q5":
        h = tl.load(high_at, mask=held, other=0).to(tl.int16) if u == 0 else h >> 4
    else:
        h = w
    return w, h


@triton.jit
def _spread(scales, mask, top, least, j, u: tl.constexpr, STYLE: tl.constexpr, one: tl.constexpr):
    """(scales, what is added) [BN, 32] of the first tile of 64 columns, ``u``, then of the second, for groups of 16.
    ``one``: what a scale of one is in E4M3."""
    early = (j < 16)[None, :]
    if STYLE == "e4m3":
        # A word has the scales of the first halves of four tiles, the next word those of the second halves.
        v = tl.load(scales + 2 * (u // 2), mask=mask, other=0)
        w = tl.load(scales + 2 * (u // 2) + 1, mask=mask, other=0)
        s0 = _float8(v, 2 * (u % 2)) * 1.329227995784916e36 * one
        s1 = _float8(w, 2 * (u % 2)) * 1.329227995784916e36 * one
        s2 = _float8(v, 2 * (u % 2) + 1) * 1.329227995784916e36 * one
        s3 = _float8(w, 2 * (u % 2) + 1) * 1.329227995784916e36 * one
        m0 = tl.zeros(top.shape, tl.float32)
        m1, m2, m3 = m0, m0, m0
    else:
        s0, m0 = _quad(scales, mask, top, least, u, 0, STYLE)
        s1, m1 = _quad(scales, mask, top, least, u, 1, STYLE)
        s2, m2 = _quad(scales, mask, top, least, u, 2, STYLE)
        s3, m3 = _quad(scales, mask, top, least, u, 3, STYLE)
    return (
        tl.where(early, s0[:, None], s1[:, None]), tl.where(early, m0[:, None], m1[:, None]),
        tl.where(early, s2[:, None], s3[:, None]), tl.where(early, m2[:, None], m3[:, None]),
    )  # fmt: skip


@triton.jit
def packed_sum(
    x_at, there, low, high, scales, tops, n, inside, rows, columns, first, last,
    KIND: tl.constexpr, STYLE: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, BF16: tl.constexpr,
    UNITS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, WORDS: tl.constexpr, ADDED: tl.constexpr,
    PTX: tl.constexpr, SUMS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """[BN, BM] sums of rows ``n`` times the rows of x that begin at ``x_at`` [1, BM], over spans ``first`` to ``last``.

    SUMS: a group's products are summed before they are scaled; the offset of its numbers is multiplied with the sum
    of x, a product with ones. Else numbers are scaled before, and rounded to x's dtype. EVEN: whole spans of columns.
    """
    to: tl.constexpr = x_at.dtype.element_ty
    # With the exponents of scales, one product less for each number.
    small: tl.constexpr = KIND == "e2m1" and STYLE == "e4m3" and PTX
    FIELDS: tl.constexpr = "small e2m1" if small else KIND
    one: tl.constexpr = 1.2676506002282294e30 if small else 1.0  # 2^100, and 2^26 in the end
    plain: tl.constexpr = KIND == "e2m1" or KIND == "table"  # nothing is added to these
    shifted: tl.constexpr = STYLE == "super" or STYLE == "pair" or STYLE == "zero" or ADDED + ZERO != 0
    j = tl.arange(0, 32)
    row = tl.cast(first, tl.int64) * rows + n
    low_at, high_at, scales_at, tops_at = _places(low, high, scales, tops, row, j, LOW, HIGH, WORDS)
    table, h0, h1, h2, h3, l0, l1, l2, l3 = _table_words(tops, n, rows, KIND, PTX)
    x_at = x_at + first * (128 * UNITS) + j[:, None]
    acc = tl.zeros([BN, BM], tl.float32)
    none = tl.zeros([BN], tl.float32)
    minus = none[:, None] - (ADDED + ZERO)
    for span in range(first, last):
        if PTX and SUMS:
            _fetch(low, tl.cast(tl.minimum(span + 6, last - 1), tl.int64) * rows + tl.minimum(n, rows - 1), LOW)
        top, least = _tops(tops_at, inside, BN, STYLE, BF16)
        left = columns - span * (128 * UNITS) - j[:, None]
        p = tl.zeros([BN, BM], tl.float32)
        t = tl.zeros([BN, BM], tl.float32)
        w = tl.zeros([BN, 32], tl.int16)
        h = w
        for u in tl.static_range(2 * UNITS):
            if EVEN:
                a = tl.load(x_at + u * 64, mask=there, other=0.0)
                b = tl.load(x_at + (u * 64 + 32), mask=there, other=0.0)
            else:
                a = tl.load(x_at + u * 64, mask=there & (left > u * 64), other=0.0)
                b = tl.load(x_at + (u * 64 + 32), mask=there & (left > u * 64 + 32), other=0.0)
            if u % 2 == 0:
                w, h = _next_words(low_at, high_at, inside, w, h, u // 2, KIND)
                lo, hi, third, fourth, ones = numbers_of(
                    w, h, table, h0, h1, h2, h3, l0, l1, l2, l3, FIELDS, PTX, ZERO, to
                )
            else:
                lo = third
                hi = fourth
            if GROUP == 16:
                s0, m0, s1, m1 = _spread(scales_at, inside, top, least, j, u, STYLE, one)
                lo = _scaled(lo, minus, s0, m0, PTX, plain)
                hi = _scaled(hi, minus, s1, m1, PTX, plain)
                acc = tl.dot(lo, a, acc, input_precision=PRECISION)
                acc = tl.dot(hi, b, acc, input_precision=PRECISION)
            elif SUMS:
                s0, m0, z0, s1, m1, z1 = _pair(scales_at, inside, top, least, u, STYLE, GROUP, BF16)
                if GROUP == 32:
                    acc = tl.dot(lo, a, input_precision=PRECISION) * s0[:, None] + acc
                    if shifted:
                        m0 -= s0 * (z0 + (ADDED + ZERO))
                        acc = tl.dot(ones, a, input_precision=PRECISION) * m0[:, None] + acc
                    acc = tl.dot(hi, b, input_precision=PRECISION) * s1[:, None] + acc
                    if shifted:
                        m1 -= s1 * (z1 + (ADDED + ZERO))
                        acc = tl.dot(ones, b, input_precision=PRECISION) * m1[:, None] + acc
                else:
                    p = tl.dot(lo, a, p, input_precision=PRECISION)
                    p = tl.dot(hi, b, p, input_precision=PRECISION)
                    if shifted:
                        t = tl.dot(ones, a, t, input_precision=PRECISION)
                        t = tl.dot(ones, b, t, input_precision=PRECISION)
                    if (u + 1) * 64 % GROUP == 0:
                        acc = p * s0[:, None] + acc
                        p = tl.zeros([BN, BM], tl.float32)
                        if shifted:
                            m0 -= s0 * (z0 + (ADDED + ZERO))
                            acc = t * m0[:, None] + acc
                            t = tl.zeros([BN, BM], tl.float32)
            else:
                s0, m0, z0, s1, m1, z1 = _pair(scales_at, inside, top, least, u, STYLE, GROUP, BF16)
                lo = _scaled(lo, minus - z0[:, None], s0[:, None], m0[:, None], PTX, plain)
                hi = _scaled(hi, minus - z1[:, None], s1[:, None], m1[:, None], PTX, plain)
                acc = tl.dot(lo, a, acc, input_precision=PRECISION)
                acc = tl.dot(hi, b, acc, input_precision=PRECISION)
        low_at += tl.cast(rows, tl.int64) * LOW
        high_at += tl.cast(rows, tl.int64) * HIGH
        scales_at += tl.cast(rows, tl.int64) * WORDS
        tops_at += rows
        x_at += 128 * UNITS
    if STYLE == "e4m3":
        acc *= (tl.load(tops + n, mask=inside, other=0.0) * (67108864.0 if small else 1.0))[:, None]
    return acc


@fast_launch
@triton.jit
def packed_kernel(
    x, low, high, scales, tops, factors, bias, y, parts, arrived, tokens, rows, columns, x_row, y_row, spans, each,
    FACTORS: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr, STYLE: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, BF16: tl.constexpr, UNITS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    WORDS: tl.constexpr, ADDED: tl.constexpr, PTX: tl.constexpr, SUMS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y [tokens, rows] = x @ wᵀ for BM tokens and BN rows a program; splits of ``each`` spans as in
    ``skinny_kernel``; FACTORS: sums are multiplied by ``factors`` [tokens]. The weights are the left operand, with few
    rows a program: of many rows, a warp group's product would read them two bytes at a time."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    inside = n < rows
    there = m < tokens
    first = tl.program_id(2) * each
    last = tl.minimum(first + each, spans)
    x_at = x + m.to(tl.int64)[None, :] * x_row
    acc = packed_sum(
        x_at, there[None, :], low, high, scales, tops, n, inside, rows, columns, first, last, KIND, STYLE, GROUP, ZERO,
        BF16, UNITS, LOW, HIGH, WORDS, ADDED, PTX, SUMS, EVEN, PRECISION, BM, BN,
    )  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    acc, finish = sum_of_spans(acc, parts, arrived, SPLITS, BN, BM)
    if finish:
        if FACTORS:
            acc *= tl.load(factors + m, mask=there, other=0.0)[None, :]
        if BIAS:
            acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        at = m.to(tl.int64)[None, :] * y_row + n[:, None]
        tl.store(y + at, acc.to(y.dtype.element_ty), mask=there[None, :] & inside[:, None])


@fast_launch
@triton.jit
def unpack_kernel(
    low, high, scales, tops, y, rows, columns, y_row,
    BN: tl.constexpr, KIND: tl.constexpr, STYLE: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    BF16: tl.constexpr, UNITS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, WORDS: tl.constexpr,
    ADDED: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y [rows, columns] = the numbers of a matrix; a program takes BN rows of one span."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # A number of a table is rounded once, after it is scaled.
    to: tl.constexpr = tl.float32 if KIND == "table" else y.dtype.element_ty
    span = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < rows
    j = tl.arange(0, 32)
    row = span.to(tl.int64) * rows + n
    low_at, high_at, scales_at, tops_at = _places(low, high, scales, tops, row, j, LOW, HIGH, WORDS)
    table, h0, h1, h2, h3, l0, l1, l2, l3 = _table_words(tops, n, rows, KIND, False)
    factor = tl.full([BN, 1], 1.0, tl.float32)
    if STYLE == "e4m3":
        factor = tl.load(tops + n, mask=inside, other=0.0)[:, None]
    top, least = _tops(tops_at, inside, BN, STYLE, BF16)
    minus = tl.zeros([BN], tl.float32)[:, None] - (ADDED + ZERO)
    w = tl.zeros([BN, 32], tl.int16)
    h = w
    for u in tl.static_range(2 * UNITS):
        if u % 2 == 0:
            w, h = _next_words(low_at, high_at, inside, w, h, u // 2, KIND)
            lo, hi, third, fourth, _ = numbers_of(w, h, table, h0, h1, h2, h3, l0, l1, l2, l3, KIND, PTX, ZERO, to)
        else:
            lo = third
            hi = fourth
        if GROUP == 16:
            s0, m0, s1, m1 = _spread(scales_at, inside, top, least, j, u, STYLE, 1.0)
            lo = _scaled(lo, minus, s0 * factor, m0, False)
            hi = _scaled(hi, minus, s1 * factor, m1, False)
        else:
            s0, m0, z0, s1, m1, z1 = _pair(scales_at, inside, top, least, u, STYLE, GROUP, BF16)
            lo = _scaled(lo, minus - z0[:, None], s0[:, None], m0[:, None], False)
            hi = _scaled(hi, minus - z1[:, None], s1[:, None], m1[:, None], False)
        c = (span * (2 * UNITS) + u) * 64 + j
        at = y + n.to(tl.int64)[:, None] * y_row + c[None, :]
        tl.store(at, lo, mask=inside[:, None] & (c < columns)[None, :])
        tl.store(at + 32, hi, mask=inside[:, None] & (c + 32 < columns)[None, :])
