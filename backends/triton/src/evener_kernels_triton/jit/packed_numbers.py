"""Numbers of two to eight bits, from the words in which ``jit.packed`` says they lie, to registers."""

import triton
import triton.language as tl

#: The numbers of a word go to four registers, two neighbouring columns in each, as a matrix unit takes them. A bfloat16
#: with the exponent of 128 has the number in its last bits, so 128 is added to each; 1,024 to a float16. The fifth
#: result is ones. After the conversions of Kim et al. 2022, "Who Says Elephants Can't Run".
_MAGIC = {"bf16": ("0x43004300", "0x3F803F80"), "f16": ("0x64006400", "0x3C003C00")}


def _shifted(to, source, by):
    """``source`` shifted right by ``by`` bits, left if it is negative."""
    if by == 0:
        return f"mov.b32 {to}, {source};"
    return f"{'shr' if by > 0 else 'shl'}.b32 {to}, {source}, {abs(by)};"


def _unpack(kind, bits, more=0):
    """Code for numbers with ``bits`` bits in $5, and ``more`` further bits in $6."""
    magic, ones = _MAGIC[kind]
    mask = f"0x{(1 << bits) - 1:04X}" + f"{(1 << bits) - 1:04X}"
    lines = []
    for i in range(4):
        lines += [_shifted("a", "$5", bits * i), f"lop3.b32 ${i}, a, {mask}, {magic}, 0xEA;"]
        if more:
            place = ((1 << more) - 1) << bits
            lines += [_shifted("a", "$6", more * i - bits), f"lop3.b32 ${i}, a, 0x{place:04X}{place:04X}, ${i}, 0xEA;"]
    return tl.constexpr("\n".join(["{", ".reg .b32 a;", *lines, f"mov.b32 $4, {ones};", "}"]))


def _unpack_bytes(kind):
    """Code for signed bytes: two tiles in $5, two in $6. Of a bfloat16 the lower seven bits are its mantissa, and 128
    (256 for a negative number) is subtracted; of a float16 all eight are."""
    lines, ones = [], _MAGIC[kind][1]
    for i in range(4):
        lines.append(_shifted("a", "$5" if i < 2 else "$6", 8 * (i % 2)))
        if kind == "bf16":
            lines += ["lop3.b32 b, a, 0x00800080, 0xC300C300, 0xEA;", "lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;"]
        else:
            lines += ["lop3.b32 a, a, 0x00FF00FF, 0x64006400, 0xEA;", "xor.b32 a, a, 0x00800080;",
                      "mov.b32 b, 0xE480E480;"]  # fmt: skip
        lines.append(f"fma.rn.{kind}x2 ${i}, a, one, b;")
    one = f"mov.b32 one, {ones};"
    return tl.constexpr("\n".join(["{", ".reg .b32 a, b, one;", one, *lines, f"mov.b32 $4, {ones};", "}"]))


def _unpack_floats(small=False):
    """Code for four-bit floats: sign, exponent and mantissa at their places in a bfloat16 give the number times
    2^-126. ``small``: it stays so."""
    lines = []
    for i in range(4):
        lines += [
            _shifted("a", "$5", 4 * i - 12), _shifted("b", "$5", 4 * i - 6), "and.b32 b, b, 0x01C001C0;",
            f"lop3.b32 {f'${i}' if small else 'a'}, a, 0x80008000, b, 0xEA;",
        ]  # fmt: skip
        lines += [] if small else [f"fma.rn.bf16x2 ${i}, a, power, zero;"]
    made = ["mov.b32 power, 0x7E807E80;", "mov.b32 zero, 0x80008000;", *lines, "mov.b32 $4, 0x3F803F80;"]
    return tl.constexpr("\n".join(["{", ".reg .b32 a, b, power, zero;", *made, "}"]))


def _look_up():
    """Code for numbers of a table of bfloat16, whose upper bytes are $6, $8, $10 and $12 and lower bytes $14 to $20;
    each is there twice, for both of the neighbouring columns. A byte of the result is one of eight, or of eight others
    where the mask k has ones."""
    lines = [
        "mov.b32 ends, 0x0000FF00;", "prmt.b32 n, $5, $5, 0x3120;", "and.b32 s, n, 0x77777777;",
        "shr.b32 m, n, 3;", "and.b32 m, m, 0x11111111;",
    ]  # fmt: skip
    for half in range(2):
        lines += ["shr.b32 s, s, 16;", "shr.b32 m, m, 16;"] if half else []
        lines.append("prmt.b32 k, ends, ends, m;")
        for name, at in (("h", 6), ("l", 14)):
            lines += [
                f"prmt.b32 a, ${at}, ${at + 2}, s;", f"prmt.b32 b, ${at + 4}, ${at + 6}, s;",
                f"lop3.b32 {name}, a, b, k, 0xD8;",
            ]  # fmt: skip
        lines += [f"prmt.b32 ${2 * half}, l, h, 0x6240;", f"prmt.b32 ${2 * half + 1}, l, h, 0x7351;"]
    lines.append("mov.b32 $4, 0x3F803F80;")
    return tl.constexpr("\n".join(["{", ".reg .b32 ends, n, s, m, k, a, b, h, l;", *lines, "}"]))


_TWO_BF16, _THREE_BF16, _FOUR_BF16 = _unpack("bf16", 2), _unpack("bf16", 2, 1), _unpack("bf16", 4)
_FIVE_BF16, _SIX_BF16, _EIGHT_BF16 = _unpack("bf16", 4, 1), _unpack("bf16", 4, 2), _unpack_bytes("bf16")
_TWO_F16, _THREE_F16, _FOUR_F16 = _unpack("f16", 2), _unpack("f16", 2, 1), _unpack("f16", 4)
_FIVE_F16, _SIX_F16, _EIGHT_F16 = _unpack("f16", 4, 1), _unpack("f16", 4, 2), _unpack_bytes("f16")
_E2M1_BF16, _SMALL_BF16, _TABLE_BF16 = _unpack_floats(), _unpack_floats(True), _look_up()
_TABLE_TYPES = tl.constexpr("=&r,=&r,=&r,=&r,=&r" + ",r" * 17)


@triton.jit
def _bf16_tiles(low, more, CODE: tl.constexpr):
    return tl.inline_asm_elementwise(
        CODE, "=&r,=&r,=&r,=&r,=&r,r,r", [low, more],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _f16_tiles(low, more, CODE: tl.constexpr):
    return tl.inline_asm_elementwise(
        CODE, "=&r,=&r,=&r,=&r,=&r,r,r", [low, more],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _table_tiles(low, h0, h1, h2, h3, l0, l1, l2, l3):
    """Four tiles of numbers of a table, and ones."""
    return tl.inline_asm_elementwise(
        _TABLE_BF16, _TABLE_TYPES, [low, h0, h1, h2, h3, l0, l1, l2, l3],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def number_of(a, more, table, i: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, to: tl.constexpr):
    """The number of tile ``i``, without PTX; ``a`` and ``more`` are int32."""
    if KIND == "e2m1":
        # A float16 has the same fields, with three more bits of exponent and nine more of mantissa.
        v = a >> (4 * i)
        half = ((v & 8) << 12 | (v & 7) << 9).to(tl.uint16).to(tl.float16, bitcast=True)
        y = (half.to(tl.float32) * 16384.0).to(to)
    elif KIND == "table":
        y = tl.load(table + ((a >> (4 * i)) & 15)).to(tl.float32, bitcast=True).to(to)
    else:
        if KIND == "q8":
            v = ((a if i < 2 else more) << (24 - 8 * (i % 2))) >> 24
        elif KIND == "q4":
            v = (a >> (4 * i)) & 15
        elif KIND == "q5":
            v = (a >> (4 * i)) & 15 | ((more >> i) & 1) << 4
        elif KIND == "q6":
            v = (a >> (4 * i)) & 15 | ((more >> (2 * i)) & 3) << 4
        elif KIND == "q3":
            v = (a >> (2 * i)) & 3 | ((more >> i) & 1) << 2
        else:
            v = (a >> (2 * i)) & 3
        y = (v - ZERO).to(tl.float32).to(to)
    return y


@triton.jit
def numbers_of(
    low, more, table, h0, h1, h2, h3, l0, l1, l2, l3, KIND: tl.constexpr, PTX: tl.constexpr, ZERO: tl.constexpr,
    to: tl.constexpr,
):  # fmt: skip
    """Four tiles of numbers of the dtype ``to``, and ones. With PTX, ``ADDED`` is added to each; else ZERO is
    subtracted. Bytes, four-bit floats and numbers of a table are what they are. The words [rows, 1] are those of
    ``_table_words``."""
    if PTX and to == tl.bfloat16 and KIND == "q4":
        q0, q1, q2, q3, ones = _bf16_tiles(low, more, _FOUR_BF16)
    elif PTX and to == tl.bfloat16 and KIND == "q5":
        q0, q1, q2, q3, ones = _bf16_tiles(low, more, _FIVE_BF16)
    elif PTX and to == tl.bfloat16 and KIND == "q6":
        q0, q1, q2, q3, ones = _bf16_tiles(low, more, _SIX_BF16)
    elif PTX and to == tl.bfloat16 and KIND == "q3":
        q0, q1, q2, q3, ones = _bf16_tiles(low, more, _THREE_BF16)
    elif PTX and to == tl.bfloat16 and KIND == "q2":
        q0, q1, q2, q3, ones = _bf16_tiles(low, more, _TWO_BF16)
    elif PTX and to == tl.bfloat16 and KIND == "q8":
        q0, q1, q2, q3, ones = _bf16_tiles(low, more, _EIGHT_BF16)
    elif PTX and to == tl.bfloat16 and KIND == "e2m1":
        q0, q1, q2, q3, ones = _bf16_tiles(low, more, _E2M1_BF16)
    elif KIND == "small e2m1":  # with PTX, times 2^-126
        q0, q1, q2, q3, ones = _bf16_tiles(low, more, _SMALL_BF16)
    elif PTX and to == tl.bfloat16 and KIND == "table":
        q0, q1, q2, q3, ones = _table_tiles(low, h0, h1, h2, h3, l0, l1, l2, l3)
    elif PTX and to == tl.float16 and KIND == "q4":
        q0, q1, q2, q3, ones = _f16_tiles(low, more, _FOUR_F16)
    elif PTX and to == tl.float16 and KIND == "q5":
        q0, q1, q2, q3, ones = _f16_tiles(low, more, _FIVE_F16)
    elif PTX and to == tl.float16 and KIND == "q6":
        q0, q1, q2, q3, ones = _f16_tiles(low, more, _SIX_F16)
    elif PTX and to == tl.float16 and KIND == "q3":
        q0, q1, q2, q3, ones = _f16_tiles(low, more, _THREE_F16)
    elif PTX and to == tl.float16 and KIND == "q2":
        q0, q1, q2, q3, ones = _f16_tiles(low, more, _TWO_F16)
    elif PTX and to == tl.float16 and KIND == "q8":
        q0, q1, q2, q3, ones = _f16_tiles(low, more, _EIGHT_F16)
    else:
        a = low.to(tl.int32)
        b = more.to(tl.int32)
        q0 = number_of(a, b, table, 0, KIND, ZERO, to)
        q1 = number_of(a, b, table, 1, KIND, ZERO, to)
        q2 = number_of(a, b, table, 2, KIND, ZERO, to)
        q3 = number_of(a, b, table, 3, KIND, ZERO, to)
        ones = tl.full(low.shape, 1.0, to)
    return q0, q1, q2, q3, ones
