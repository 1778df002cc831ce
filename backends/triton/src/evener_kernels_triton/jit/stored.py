"""Weights of one byte an element with scales: bytes to numbers, and scales onto sums.

A scale belongs to HIGH rows and WIDE columns of a matrix; WIDE 0: to whole rows. The matrix of scales is float32
[rows / HIGH, columns / WIDE], rounded up.
"""

import triton
import triton.language as tl

from evener_kernels_triton.jit.arrival import sum_of_spans
from evener_kernels_triton.jit.launch import fast_launch
from evener_kernels_triton.jit.rows import activate

#: Four e4m3 as four bfloat16: sign, exponent and mantissa move to their places in pairs of 16 bits, which gives the
#: value times 2^-120, and a product with 2^120 corrects it; subnormal numbers too. After Marlin's conversion (Frantar
#: et al. 2024). The device's own instruction converts to float16, and the way on to bfloat16 takes most of a product's
#: time.
_E4M3_TO_BF16 = tl.constexpr("""
{
.reg .b32 low, high, a, b;
prmt.b32 low, $2, 0, 0x1404;
prmt.b32 high, $2, 0, 0x3424;
shr.b32 a, low, 4;
shr.b32 b, high, 4;
and.b32 a, a, 0x07F007F0;
and.b32 b, b, 0x07F007F0;
lop3.b32 low, low, 0x80008000, a, 0xEA;
lop3.b32 high, high, 0x80008000, b, 0xEA;
mov.b32 a, 0x7B807B80;
mov.b32 b, 0x80008000;
fma.rn.bf16x2 $0, low, a, b;
fma.rn.bf16x2 $1, high, a, b;
}
""")
#: Four int8 as four bfloat16: with the lower seven bits as a mantissa the number is 128 + bits, and 128 (256 for a
#: negative one) is subtracted.
_INT8_TO_BF16 = tl.constexpr("""
{
.reg .b32 low, high, a, b, one;
prmt.b32 low, $2, 0, 0x4140;
prmt.b32 high, $2, 0, 0x4342;
lop3.b32 a, low, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 low, low, 0x00800080, 0xC300C300, 0xEA;
lop3.b32 b, high, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 high, high, 0x00800080, 0xC300C300, 0xEA;
mov.b32 one, 0x3F803F80;
fma.rn.bf16x2 $0, a, one, low;
fma.rn.bf16x2 $1, b, one, high;
}
""")


@triton.jit
def _by_fours(stored, CODE: tl.constexpr):
    return tl.inline_asm_elementwise(CODE, "=r,=r,r", [stored], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def widened(stored, KIND: tl.constexpr, PTX: tl.constexpr, to: tl.constexpr):
    """Stored elements as numbers of the dtype ``to``, exactly. KIND "": they are numbers already. PTX: the device
    knows the instructions above."""
    if KIND == "":
        y = stored.to(to)
    elif KIND == "e4m3" and PTX and to != tl.float16:
        y = _by_fours(stored, _E4M3_TO_BF16).to(to)
    elif KIND == "int8" and PTX and to != tl.float16:
        y = _by_fours(stored, _INT8_TO_BF16).to(to)
    elif KIND == "int8":
        y = stored.to(tl.int8, bitcast=True).to(tl.float32).to(to)
    elif KIND == "e5m2":
        # The upper half of a float16.
        y = (stored.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(to)
    else:
        # float16 has the same fields, with one more bit of exponent (a bias of 15, not 7) and seven more of mantissa.
        wide = stored.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        y = (half.to(tl.float16, bitcast=True) * 256.0).to(to)
    return y


#: What x is multiplied by before products with the numbers of ``_four_floats``: no product of common numbers is near
#: the ends of float32.
_LIFT = tl.constexpr(18446744073709551616.0)  # 2^64
#: What their sums are multiplied by afterwards: 2^56, 2^48.
_DROP_E4M3, _DROP_E5M2 = tl.constexpr(72057594037927936.0), tl.constexpr(281474976710656.0)
#: Columns whose products are summed before the sum is scaled; a block of scales has a multiple of them.
STEP = tl.constexpr(16)
#: Four e4m3 as four float32, by way of float16, with the device's own instructions: one for two elements, and one each.
_E4M3_TO_FLOATS = tl.constexpr("""
{
.reg .b16 low, high, a, b, c, d;
.reg .b32 left, right;
mov.b32 {low, high}, $4;
cvt.rn.f16x2.e4m3x2 left, low;
cvt.rn.f16x2.e4m3x2 right, high;
mov.b32 {a, b}, left;
mov.b32 {c, d}, right;
cvt.f32.f16 $0, a;
cvt.f32.f16 $1, b;
cvt.f32.f16 $2, c;
cvt.f32.f16 $3, d;
}
""")


@triton.jit
def lifted(x, KIND: tl.constexpr, CAST: tl.constexpr):
    """float32 ``x`` as ``step_sums`` takes it."""
    return x if KIND == "int8" or CAST else x * _LIFT


@triton.jit
def dropped(sums, KIND: tl.constexpr, CAST: tl.constexpr):
    """Sums of ``step_sums``, as they would be without ``lifted``."""
    if KIND == "e4m3" and not CAST:
        sums = sums * _DROP_E4M3
    elif KIND == "e5m2":
        sums = sums * _DROP_E5M2
    return sums


@triton.jit
def _four_floats(words, KIND: tl.constexpr, CAST: tl.constexpr):
    """The four elements of each word as float32; float8 times 2^-120 (e4m3) and 2^-112 (e5m2): the fields move to their
    places, two elements at a time, and nothing else is done. CAST: by the device's own instructions, as they are.

    By way of bytes and bfloat16 numbers a product takes twice as many instructions.
    """
    u = words.to(tl.uint32, bitcast=True)
    if KIND == "int8":
        # With a byte as its lowest bits, this float is 2^23 + byte.
        v = u ^ 0x80808080
        f0 = ((v & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
        f1 = (((v >> 8) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
        f2 = (((v >> 16) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
        f3 = ((v >> 24) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    elif CAST:
        f0, f1, f2, f3 = tl.inline_asm_elementwise(
            _E4M3_TO_FLOATS, "=f,=f,=f,=f,r", [words], dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        SHIFT: tl.constexpr = 4 if KIND == "e4m3" else 3
        FIELDS: tl.constexpr = 0x07F007F0 if KIND == "e4m3" else 0x0FE00FE0
        odd = ((u >> SHIFT) & FIELDS) | (u & 0x80008000)
        even = ((u << (8 - SHIFT)) & FIELDS) | ((u << 8) & 0x80008000)
        f0 = (even << 16).to(tl.float32, bitcast=True)
        f1 = (odd << 16).to(tl.float32, bitcast=True)
        f2 = (even & 0xFFFF0000).to(tl.float32, bitcast=True)
        f3 = (odd & 0xFFFF0000).to(tl.float32, bitcast=True)
    return f0, f1, f2, f3


@triton.jit
def fours(x):
    """x [.., n] as four tensors [.., n / 4]: what each word of four stored elements is multiplied by."""
    if len(x.shape) == 2:
        y = tl.reshape(x, [x.shape[0], x.shape[1] // 4, 2, 2])
    else:
        y = tl.reshape(x, [x.shape[0] // 4, 2, 2])
    even, odd = tl.split(y)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def step_sums(words, x0, x1, x2, x3, KIND: tl.constexpr, CAST: tl.constexpr):
    """Sums of each STEP columns of products of stored elements, four to a word [.., columns / 4], and ``fours`` of
    ``lifted`` x, with as many axes: [.., columns / STEP], in float32."""
    f0, f1, f2, f3 = _four_floats(words, KIND, CAST)
    y = f0 * x0 + f1 * x1 + f2 * x2 + f3 * x3
    each: tl.constexpr = STEP // 4
    if len(words.shape) == 3:
        y = tl.sum(tl.reshape(y, [words.shape[0], words.shape[1], words.shape[2] // each, each]), 3)
    else:
        y = tl.sum(tl.reshape(y, [words.shape[0], words.shape[1] // each, each]), 2)
    return y


@triton.jit
def step_scales(scales, n, inside, blocks, k, HIGH: tl.constexpr, WIDE: tl.constexpr, BK: tl.constexpr):
    """The scales of ``step_sums`` of rows ``n`` and BK columns from ``k``: [rows, BK / STEP], or [rows, 1] if all
    columns share one; 0 for rows that are not inside."""
    g = (k + tl.arange(0, BK // STEP) * STEP) // WIDE if WIDE > 0 else tl.arange(0, 1)
    at = scales + ((n // HIGH) * blocks)[:, None] + g[None, :]
    return tl.load(at, mask=inside[:, None] & (g < blocks)[None, :], other=0.0)


@triton.jit
def row_scales(scales, n, inside, blocks, k, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """The scales of rows ``n`` at column ``k``; 0 for rows that are not inside."""
    at = scales + (n // HIGH) * blocks
    if WIDE > 0:
        at += k // WIDE
    return tl.load(at, mask=inside, other=0.0)


@fast_launch
@triton.jit
def stored_kernel(
    x, w, scales, bias, y, parts, arrived, tokens, rows, columns, blocks, x_row, y_row, each,
    ACT: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr, HIGH: tl.constexpr,
    WIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y [tokens, rows] = x @ wᵀ for BM tokens and BN rows a program; splits as in ``skinny_kernel``.

    ACT: w has the up rows after the gate rows, y half as many columns; rows of both alternate in a tile.

    The weights are the right operand: for 16 tokens that is the older matrix unit, whose right operand is converted in
    registers as it lies in memory. Measured on a GPU with 132 units, 24,576 x 4,096 and 16 tokens: 28.6 µs, and 40.5
    with the weights on the left.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    inside = n < rows
    there = m < tokens
    part = tl.program_id(2)
    if ACT != "":
        n = n // 2 + tl.where(n % 2 == 1, rows // 2, 0)
    x_at = x + m.to(tl.int64)[:, None] * x_row
    w_at = w + n.to(tl.int64)[None, :] * columns
    acc = tl.zeros([BM, BN], tl.float32)
    stop = tl.minimum(part * each + each, columns)
    scale = row_scales(scales, n, inside, blocks, part * each, HIGH, WIDE)
    for k in range(part * each, stop, BK):
        c = k + tl.arange(0, BK)
        if EVEN:
            a = tl.load(x_at + c[None, :], mask=there[:, None], other=0.0)
            b = tl.load(w_at + c[:, None])
        else:
            real = c < columns
            a = tl.load(x_at + c[None, :], mask=there[:, None] & real[None, :], other=0.0)
            b = tl.load(w_at + c[:, None], mask=inside[None, :] & real[:, None], other=0)
        b = widened(b, KIND, PTX, x.dtype.element_ty)
        if WIDE > 0:
            # Loaded before the product, and used after the next one: nothing waits for it.
            coming = row_scales(scales, n, inside, blocks, tl.where(k + BK < stop, k + BK, k), HIGH, WIDE)
            acc += tl.dot(a, b, input_precision=PRECISION) * scale[None, :]
            scale = coming
        else:
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if WIDE == 0:
        acc *= scale[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    acc, finish = sum_of_spans(acc, parts, arrived, SPLITS, BM, BN)
    if finish:
        if BIAS:
            acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
        if ACT == "":
            at = m.to(tl.int64)[:, None] * y_row + n[None, :]
            tl.store(y + at, acc.to(y.dtype.element_ty), mask=there[:, None] & inside[None, :])
        else:
            gate, up = tl.split(tl.reshape(acc, [BM, BN // 2, 2]))
            o = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
            at = m.to(tl.int64)[:, None] * y_row + o[None, :]
            mask = there[:, None] & (o < rows // 2)[None, :]
            tl.store(y + at, (activate(gate, ACT) * up).to(y.dtype.element_ty), mask=mask)


@fast_launch
@triton.jit
def dequantize_kernel(
    w, scales, y, rows, columns, blocks,
    KIND: tl.constexpr, PTX: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y [rows, columns] = w times its scales; a program takes BN rows and BK columns, within one block of columns."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.program_id(1) * BK
    c = k + tl.arange(0, BK)
    inside = n < rows
    at = n.to(tl.int64)[:, None] * columns + c[None, :]
    mask = inside[:, None] & (c < columns)[None, :]
    values = widened(tl.load(w + at, mask=mask, other=0), KIND, PTX, tl.float32)
    values *= row_scales(scales, n, inside, blocks, k, HIGH, WIDE)[:, None]
    tl.store(y + at, values.to(y.dtype.element_ty), mask=mask)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
