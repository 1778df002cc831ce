"""Products of one token with weights of four bits: integers and numbers of a table, in words of 64 bits.

A thread takes a piece at a time: 16 bytes, which are eight neighbouring columns of each of the four tiles of 128
columns (``jit.packed`` says how numbers lie in words). x becomes whole numbers of 16 bits times a power of two for each
piece: a bfloat16 with the exponent of the largest of the piece or one of the six below keeps its value, and what is
lost of smaller ones is less than the last bit of the largest. Products of bytes (``dp4a``) take one instruction for
four numbers; float32 takes four conversions and four products. Sums are exact until they are scaled.

A number of a table is looked up as a whole number of 7 bits: one for E2M1, twice its numbers plus 12; two for other
tables, a number of 14 bits (``tables.table_words``), whose products are added with the factor 128.
"""

import triton
import triton.language as tl

from evener_kernels_triton.jit.launch import fast_launch
from evener_kernels_triton.jit.packed import _as_float, _float8
from evener_kernels_triton.jit.packed_numbers import number_of
from evener_kernels_triton.jit.rows import activate

#: Columns of a piece, and words of 64 bits of 128 columns.
PIECE, WORDS_OF_UNIT = tl.constexpr(32), tl.constexpr(8)
#: A whole number plus this has the number in its lower 16 bits.
_WHOLE = tl.constexpr(12582912.0)
#: Of four words: their second bytes in one word, and their first bytes.
_BYTES = tl.constexpr("""
{
.reg .b32 a, b;
prmt.b32 a, $2, $3, 0x0051;
prmt.b32 b, $4, $5, 0x0051;
prmt.b32 $0, a, b, 0x5410;
prmt.b32 a, $2, $3, 0x0040;
prmt.b32 b, $4, $5, 0x0040;
prmt.b32 $1, a, b, 0x5410;
}
""")


def _dots(results):
    """Code for a piece's sum of products, or one for each tile. After the results come two words of 64 bits; then x,
    for each of them and each tile the upper bytes of four columns, and the lower bytes."""
    lines = [f"mov.b32 {name}{i}, 0;" for i in range(results) for name in "hl"]
    for half in range(2):
        lines.append(f"mov.b64 {{p, q}}, ${results + half};")
        for tile in range(4):
            if tile % 2 == 0:
                lines.append(f"prmt.b32 n, p, q, {'0x7531' if tile else '0x6420'};")
            else:
                lines.append("shr.u32 n, n, 4;")
            to, at = tile if results > 1 else 0, results + 2 + 8 * half + 2 * tile
            lines += [
                "and.b32 t, n, 0x0F0F0F0F;", f"dp4a.u32.s32 h{to}, t, ${at}, h{to};",
                f"dp4a.u32.u32 l{to}, t, ${at + 1}, l{to};",
            ]  # fmt: skip
    lines += [f"mad.lo.s32 ${i}, h{i}, 256, l{i};" for i in range(results)]
    return "\n".join(["{", f".reg .b32 p, q, n, t, h<{results}>, l<{results}>;", *lines, "}"])


def _table_dots(planes):
    """Code for a piece's sums of products with numbers that are looked up, one for each tile: operands as above, then
    what the lower sums begin with, then a table's planes. A plane has two words for the first eight numbers and two for
    the others. ``prmt`` gives zero for a selector with its upper bit, as no byte has that, so one of two is zero."""
    lines = [f"mov.b32 l{i}, ${22 + i};" for i in range(4)]
    lines += [f"mov.b32 h{i}, 0;" for i in range(4 * planes)] + [f"mov.b32 l{i}, 0;" for i in range(4, 4 * planes)]
    for half in range(2):
        lines.append(f"mov.b64 {{p, q}}, ${4 + half};")
        for pair in range(2):
            # Of two tiles, four columns: numbers of four bits, by column.
            lines += [
                f"prmt.b32 s, p, q, {'0x7531' if pair else '0x6420'};", "xor.b32 d, s, 0x88888888;",
                "shr.u32 n, s, 16;", "shr.u32 m, d, 16;",
            ]  # fmt: skip
            for plane in range(planes):
                first = 26 + 4 * plane
                for name, low, high in (("a", "s", "d"), ("b", "n", "m")):
                    lines += [
                        f"prmt.b32 {name}, ${first}, ${first + 1}, {low};",
                        f"prmt.b32 t, ${first + 2}, ${first + 3}, {high};", f"or.b32 {name}, {name}, t;",
                    ]  # fmt: skip
                # The last plane's sums are those that begin with a number.
                to, at = 2 * pair + 4 * (planes - 1 - plane), 6 + 8 * half + 4 * pair
                lines += [
                    "prmt.b32 t, a, b, 0x6420;", f"dp4a.u32.s32 h{to}, t, ${at}, h{to};",
                    f"dp4a.u32.u32 l{to}, t, ${at + 1}, l{to};", "prmt.b32 t, a, b, 0x7531;",
                    f"dp4a.u32.s32 h{to + 1}, t, ${at + 2}, h{to + 1};",
                    f"dp4a.u32.u32 l{to + 1}, t, ${at + 3}, l{to + 1};",
                ]  # fmt: skip
    for i in range(4):
        lines.append(f"mad.lo.s32 ${i}, h{i}, 256, l{i};")
        if planes > 1:
            lines += [f"mad.lo.s32 t, h{i + 4}, 256, l{i + 4};", f"mad.lo.s32 ${i}, t, 128, ${i};"]
    held = f".reg .b32 p, q, s, d, n, m, t, a, b, h<{4 * planes}>, l<{4 * planes}>;"
    return "\n".join(["{", held, *lines, "}"])


_SUM, _SUMS = tl.constexpr(_dots(1)), tl.constexpr(_dots(4))
_E2M1_SUMS, _TABLE_SUMS = tl.constexpr(_table_dots(1)), tl.constexpr(_table_dots(2))
_WORDS_IN = ",l,l" + ",r" * 16
_SUM_TYPES, _SUMS_TYPES = tl.constexpr("=&r" + _WORDS_IN), tl.constexpr("=&r,=&r,=&r,=&r" + _WORDS_IN)
_E2M1_TYPES = tl.constexpr("=&r,=&r,=&r,=&r" + _WORDS_IN + ",r" * 8)
_TABLE_TYPES = tl.constexpr("=&r,=&r,=&r,=&r" + _WORDS_IN + ",r" * 12)
#: The plane of E2M1's table: 12 + 0, 1, 2, 3, 4, 6, 8, 12, and 12 less the same.
_E0, _E1 = tl.constexpr(0x0F0E0D0C), tl.constexpr(0x18141210)
_E2, _E3 = tl.constexpr(0x090A0B0C), tl.constexpr(0x00040608)


@triton.jit
def _columns(tile: tl.constexpr, BK: tl.constexpr):
    """Columns [pieces, 8] of a tile."""
    i = tl.arange(0, BK // PIECE)
    return (i // 4 * 128 + i % 4 * 8 + 32 * tile)[:, None] + tl.arange(0, 8)[None, :]


@triton.jit
def _load_x(x, columns, tile: tl.constexpr, BK: tl.constexpr):
    """A tile of x, as float32 [pieces, 8]."""
    c = _columns(tile, BK)
    return tl.load(x + c, mask=c < columns, other=0.0).to(tl.float32)


@triton.jit
def _largest(v):
    """The largest absolute value, as float32 bits; NaN compares as largest."""
    return tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def _tile_bytes(v, scale, PTX: tl.constexpr):
    """A tile of x times ``scale`` [pieces]: (upper bytes, lower bytes) of the first four columns, the same of the
    others, and the sum of all, each int32 [pieces]."""
    n = (v * scale[:, None] + _WHOLE).to(tl.int32, bitcast=True)
    even, odd = tl.split(tl.reshape(n, [n.shape[0], 2, 2, 2]))
    n0, n2 = tl.split(even)
    n1, n3 = tl.split(odd)
    if PTX:
        up, low = tl.inline_asm_elementwise(
            _BYTES, "=&r,=&r,r,r,r,r", [n0, n1, n2, n3], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        up = (n0 >> 8) & 255 | ((n1 >> 8) & 255) << 8 | ((n2 >> 8) & 255) << 16 | ((n3 >> 8) & 255) << 24
        low = n0 & 255 | (n1 & 255) << 8 | (n2 & 255) << 16 | (n3 & 255) << 24
    up0, up1 = tl.split(up)
    low0, low1 = tl.split(low)
    total = tl.sum(((n0 << 16) >> 16) + ((n1 << 16) >> 16) + ((n2 << 16) >> 16) + ((n3 << 16) >> 16), 1)
    return up0, low0, up1, low1, total


@triton.jit
def _whole_numbers(v0, v1, v2, v3, PTX: tl.constexpr):
    """Four tiles of float32 x [pieces, 8] as whole numbers: 16 words of bytes in the order of ``_dots``, the sum of
    each tile, and what whole numbers are multiplied by, all [pieces]."""
    most = tl.maximum(tl.maximum(_largest(v0), _largest(v1)), tl.maximum(_largest(v2), _largest(v3)))
    # A number just below a power of two is rounded up to it, which 16 bits do not hold: it counts as the power.
    most = tl.maximum((tl.minimum(most, 0x7F800000) + 512) >> 23, 15)
    scale = ((268 - most) << 23).to(tl.float32, bitcast=True)
    back = tl.where(most == 255, 0x7FC00000, (most - 14) << 23).to(tl.float32, bitcast=True)
    a0, b0, c0, d0, t0 = _tile_bytes(v0, scale, PTX)
    a1, b1, c1, d1, t1 = _tile_bytes(v1, scale, PTX)
    a2, b2, c2, d2, t2 = _tile_bytes(v2, scale, PTX)
    a3, b3, c3, d3, t3 = _tile_bytes(v3, scale, PTX)
    return (a0, b0, a1, b1, a2, b2, a3, b3, c0, d0, c1, d1, c2, d2, c3, d3, t0, t1, t2, t3, back)


@triton.jit
def _packed_tile(
    low, scales, tops, n, inside, rows, spans, BK: tl.constexpr, STYLE: tl.constexpr, GROUP: tl.constexpr,
    UNITS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Rows ``n`` of all columns: two words of 64 bits, then two words with the scales of a piece and what these are
    multiplied by, each [BN, pieces]."""
    i = tl.arange(0, BK // 16)[None, :]
    each: tl.constexpr = WORDS_OF_UNIT * UNITS
    at = (i // each * rows + n[:, None]) * each + i % each
    a = tl.load(low + at, mask=inside[:, None] & (i // each < spans), other=0, eviction_policy="evict_first")
    a0, a1 = tl.split(tl.reshape(a, [a.shape[0], BK // PIECE, 2]))
    unit = (tl.arange(0, BK // PIECE) // 4)[None, :]
    row = unit // UNITS * rows + n[:, None]
    mask = inside[:, None] & (unit // UNITS < spans)
    own = scales + row * WORDS
    unit = unit % UNITS
    if STYLE == "e4m3":
        # Eight columns of each tile lie in its first half, or in its second.
        s0 = tl.load(own + 2 * unit + (tl.arange(0, BK // PIECE) // 2 % 2)[None, :], mask=mask, other=0)
        s1 = s0
    elif (
        STYLE == "super" or (STYLE == "half" and GROUP == 32) or (STYLE != "half" and STYLE != "power" and GROUP == 64)
    ):
        s0 = tl.load(own + 2 * unit, mask=mask, other=0)
        s1 = tl.load(own + 2 * unit + 1, mask=mask, other=0)
    elif GROUP == 64 or STYLE == "power" or (STYLE != "half" and GROUP == 128):
        s0 = tl.load(own + unit, mask=mask, other=0)
        s1 = s0
    else:
        s0 = tl.load(own, mask=mask, other=0)
        if GROUP == 128:
            s0 = s0 >> (16 * unit)
        s1 = s0
    top = s0
    if STYLE == "super":
        top = tl.load(tops + row, mask=mask, other=0)
    return a0, a1, s0, s1, top


@triton.jit
def _dot(a, table, up, low, tile: tl.constexpr, KIND: tl.constexpr):
    """The sum of products of the four numbers of a tile in each word of 64 bits, without PTX."""
    y = tl.zeros(a.shape, tl.int32)
    for i in tl.static_range(4):
        number = ((a >> (16 * i + 4 * tile)) & 15).to(tl.int32)
        if KIND == "e2m1":
            number = (number_of(number, number, table, 0, KIND, 0, tl.float32) * 2.0).to(tl.int32) + 12
        elif KIND == "table":
            real = number_of(number, number, table, 0, KIND, 0, tl.float32)
            number = (((real * 8191.0 + _WHOLE).to(tl.int32, bitcast=True) << 16) >> 16) + 8191
        y += number * ((((up >> (8 * i)) << 24) >> 24) * 256 + ((low >> (8 * i)) & 255))
    return y


@triton.jit
def _tile_sums(a, b, w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, PTX: tl.constexpr):
    """Sums of products of a piece, for each tile."""
    if PTX:
        y0, y1, y2, y3 = tl.inline_asm_elementwise(
            _SUMS,
            _SUMS_TYPES,
            [a, b, w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        y0 = _dot(a, a, w0, w1, 0, "q4") + _dot(b, a, w8, w9, 0, "q4")
        y1 = _dot(a, a, w2, w3, 1, "q4") + _dot(b, a, w10, w11, 1, "q4")
        y2 = _dot(a, a, w4, w5, 2, "q4") + _dot(b, a, w12, w13, 2, "q4")
        y3 = _dot(a, a, w6, w7, 3, "q4") + _dot(b, a, w14, w15, 3, "q4")
    return y0, y1, y2, y3


@triton.jit
def _table_sums(
    a, b, table, w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, n0, n1, n2, n3, none,
    KIND: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The same of numbers that are looked up, beginning with ``n0`` to ``n3``. ``none`` [1, pieces] are zeros that the
    compiler does not know: it would keep a value that is the same for all threads where each use needs a move."""
    if PTX and KIND == "e2m1":
        y0, y1, y2, y3 = tl.inline_asm_elementwise(
            _E2M1_SUMS, _E2M1_TYPES,
            [a, b, w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, n0, n1, n2, n3, none + _E0,
             none + _E1, none + _E2, none + _E3],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    elif PTX:
        at = table + 16
        y0, y1, y2, y3 = tl.inline_asm_elementwise(
            _TABLE_SUMS, _TABLE_TYPES,
            [a, b, w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, n0, n1, n2, n3,
             none + tl.load(at), none + tl.load(at + 1), none + tl.load(at + 2), none + tl.load(at + 3),
             none + tl.load(at + 4), none + tl.load(at + 5), none + tl.load(at + 6), none + tl.load(at + 7)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        y0 = _dot(a, table, w0, w1, 0, KIND) + _dot(b, table, w8, w9, 0, KIND) + n0
        y1 = _dot(a, table, w2, w3, 1, KIND) + _dot(b, table, w10, w11, 1, KIND) + n1
        y2 = _dot(a, table, w4, w5, 2, KIND) + _dot(b, table, w12, w13, 2, KIND) + n2
        y3 = _dot(a, table, w6, w7, 3, KIND) + _dot(b, table, w14, w15, 3, KIND) + n3
    return y0, y1, y2, y3


@triton.jit
def _power(word, i: tl.constexpr):
    """2 to the power of the i-th byte of words minus 127."""
    return tl.maximum(((word >> (8 * i)) & 255) << 23, 0x400000).to(tl.float32, bitcast=True)


@triton.jit
def _row_sums(
    a, b, s0, s1, top, table, w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, t0, t1, t2, t3,
    back, KIND: tl.constexpr, STYLE: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, BF16: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Sums over the columns of ``_packed_tile`` times ``_whole_numbers``, as float32 [BN]. All of x are [1, pieces].
    ``table``: where the words of these rows' table begin, if they have one."""
    if KIND != "q4":
        y0, y1, y2, y3 = _table_sums(
            a, b, table, w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, -ZERO * t0, -ZERO * t1,
            -ZERO * t2, -ZERO * t3, back.to(tl.int32, bitcast=True) >> 31, KIND, PTX,
        )  # fmt: skip
        f0 = y0.to(tl.float32)
        f1 = y1.to(tl.float32)
        f2 = y2.to(tl.float32)
        f3 = y3.to(tl.float32)
        if STYLE == "e4m3":
            r = f0 * _float8(s0, 0) + f1 * _float8(s0, 1) + f2 * _float8(s0, 2) + f3 * _float8(s0, 3)
            r *= 1.329227995784916e36
        elif STYLE == "power":
            r = f0 * _power(s0, 0) + f1 * _power(s0, 1) + f2 * _power(s0, 2) + f3 * _power(s0, 3)
        else:
            r = (f0 + f1) * s0.to(tl.float32, bitcast=True) + (f2 + f3) * s1.to(tl.float32, bitcast=True)
    elif GROUP >= 128:
        if PTX:
            y = tl.inline_asm_elementwise(
                _SUM, _SUM_TYPES, [a, b, w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15],
                dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            y0, y1, y2, y3 = _tile_sums(a, b, w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, PTX)
            y = y0 + y1 + y2 + y3
        y -= (((s0 >> 16) & 255) if STYLE == "zero" else ZERO) * (t0 + t1 + t2 + t3)
        r = y.to(tl.float32) * _as_float(s0 & 0xFFFF, BF16)
    else:
        y0, y1, y2, y3 = _tile_sums(a, b, w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, PTX)
        if STYLE == "super":
            # Scales of scales are whole numbers of six bits, so these sums are exact too.
            y = y0 * (s0 & 255) + y1 * ((s0 >> 16) & 255) + y2 * (s1 & 255) + y3 * ((s1 >> 16) & 255)
            least = t0 * ((s0 >> 8) & 255) + t1 * ((s0 >> 24) & 255) + t2 * ((s1 >> 8) & 255) + t3 * ((s1 >> 24) & 255)
            r = y.to(tl.float32) * _as_float(top & 0xFFFF, BF16)
            r -= least.to(tl.float32) * _as_float((top >> 16) & 0xFFFF, BF16)
        elif GROUP == 32:
            r = (y0 - ZERO * t0).to(tl.float32) * _as_float(s0 & 0xFFFF, BF16)
            r += (y1 - ZERO * t1).to(tl.float32) * _as_float((s0 >> 16) & 0xFFFF, BF16)
            r += (y2 - ZERO * t2).to(tl.float32) * _as_float(s1 & 0xFFFF, BF16)
            r += (y3 - ZERO * t3).to(tl.float32) * _as_float((s1 >> 16) & 0xFFFF, BF16)
        elif STYLE == "half":
            r = (y0 + y1 - ZERO * (t0 + t1)).to(tl.float32) * _as_float(s0 & 0xFFFF, BF16)
            r += (y2 + y3 - ZERO * (t2 + t3)).to(tl.float32) * _as_float((s0 >> 16) & 0xFFFF, BF16)
        else:
            r = (y0 + y1 - ((s0 >> 16) & 255) * (t0 + t1)).to(tl.float32) * _as_float(s0 & 0xFFFF, BF16)
            r += (y2 + y3 - ((s1 >> 16) & 255) * (t2 + t3)).to(tl.float32) * _as_float(s1 & 0xFFFF, BF16)
    return tl.sum(r * back, 1)


@triton.jit
def _spread(w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, t0, t1, t2, t3, back):
    """What ``_whole_numbers`` made, as ``_row_sums`` takes it."""
    return (
        w0[None, :], w1[None, :], w2[None, :], w3[None, :], w4[None, :], w5[None, :], w6[None, :], w7[None, :],
        w8[None, :], w9[None, :], w10[None, :], w11[None, :], w12[None, :], w13[None, :], w14[None, :], w15[None, :],
        t0[None, :], t1[None, :], t2[None, :], t3[None, :], back[None, :],
    )  # fmt: skip


@fast_launch
@triton.jit
def packed_token_kernel(
    x, residual, total, gain, low, scales, tops, bias, y, rows, columns, spans, eps, offset,
    ADD: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    KIND: tl.constexpr, STYLE: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, BF16: tl.constexpr,
    UNITS: tl.constexpr, WORDS: tl.constexpr, UNIT: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """``persistent_gemv_kernel`` of packed weights; its names. ``low`` is int64; with ACT the matrix has 2 * rows.
    UNIT: what the whole number 1 stands for."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    HALVES: tl.constexpr = 1 if ACT == "" else 2
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    step = tl.num_programs(0) * BN
    a, b, s, z, m = _packed_tile(low, scales, tops, n, n < rows, rows * HALVES, spans, BK, STYLE, GROUP, UNITS, WORDS)
    c, d, p, q, o = a, b, s, z, m
    if ACT != "":
        c, d, p, q, o = _packed_tile(
            low, scales, tops, n + rows, n < rows, rows * HALVES, spans, BK, STYLE, GROUP, UNITS, WORDS
        )
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    v0 = _load_x(x, columns, 0, BK)
    v1 = _load_x(x, columns, 1, BK)
    v2 = _load_x(x, columns, 2, BK)
    v3 = _load_x(x, columns, 3, BK)
    if ADD:
        v0 += _load_x(residual, columns, 0, BK)
        v1 += _load_x(residual, columns, 1, BK)
        v2 += _load_x(residual, columns, 2, BK)
        v3 += _load_x(residual, columns, 3, BK)
        if tl.program_id(0) == 0:
            at = _columns(0, BK)
            tl.store(total + at, v0, mask=at < columns)
            tl.store(total + at + 32, v1, mask=at + 32 < columns)
            tl.store(total + at + 64, v2, mask=at + 64 < columns)
            tl.store(total + at + 96, v3, mask=at + 96 < columns)
    back = 1.0
    if NORM:
        # Sums are multiplied by it, so the numbers of x do not wait for it.
        squares = tl.sum(v0 * v0 + v1 * v1 + v2 * v2 + v3 * v3, 1)
        back = tl.rsqrt(tl.sum(squares, 0) / columns + eps)
        v0 *= _load_x(gain, columns, 0, BK) + offset
        v1 *= _load_x(gain, columns, 1, BK) + offset
        v2 *= _load_x(gain, columns, 2, BK) + offset
        v3 *= _load_x(gain, columns, 3, BK) + offset
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, t0, t1, t2, t3, k = _whole_numbers(
        v0, v1, v2, v3, PTX
    )
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, t0, t1, t2, t3, k = _spread(
        w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, t0, t1, t2, t3, k * (back * UNIT)
    )
    for first in range(tl.program_id(0) * BN, rows, step):
        coming = first + step + tl.arange(0, BN)
        a_next, b_next, s_next, z_next, m_next = _packed_tile(
            low, scales, tops, coming, coming < rows, rows * HALVES, spans, BK, STYLE, GROUP, UNITS, WORDS
        )
        c_next, d_next, p_next, q_next, o_next = a_next, b_next, s_next, z_next, m_next
        if ACT != "":
            c_next, d_next, p_next, q_next, o_next = _packed_tile(
                low, scales, tops, coming + rows, coming < rows, rows * HALVES, spans, BK, STYLE, GROUP, UNITS, WORDS
            )
        n = first + tl.arange(0, BN)
        inside = n < rows
        r = _row_sums(
            a, b, s, z, m, tops + first // 32 * 32, w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14,
            w15, t0, t1, t2, t3, k, KIND, STYLE, GROUP, ZERO, BF16, PTX,
        )  # fmt: skip
        if STYLE == "e4m3":
            r *= tl.load(tops + n, mask=inside, other=0.0)
        if BIAS:
            r += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
        if ACT != "":
            up = _row_sums(
                c, d, p, q, o, tops + (rows + first) // 32 * 32, w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12,
                w13, w14, w15, t0, t1, t2, t3, k, KIND, STYLE, GROUP, ZERO, BF16, PTX,
            )  # fmt: skip
            if STYLE == "e4m3":
                up *= tl.load(tops + rows + n, mask=inside, other=0.0)
            if BIAS:
                up += tl.load(bias + rows + n, mask=inside, other=0.0).to(tl.float32)
            r = activate(r, ACT) * up
        tl.store(y + n, r.to(y.dtype.element_ty), mask=inside)
        a, b, s, z, m = a_next, b_next, s_next, z_next, m_next
        c, d, p, q, o = c_next, d_next, p_next, q_next, o_next
