"""Elements of quantized state: numbers divided by the scale of their head, in one byte (``evener.state_pages``).

Bits are moved with integers, so that devices without float8 can do it too.
"""

import triton
import triton.language as tl


@triton.jit
def narrowed(x, KIND: tl.constexpr):
    """float32 ``x`` as the nearest element, to even if two are equally near; what is too large becomes the largest. The
    result is uint8, and int8 for KIND "int8", where NaN becomes 0."""
    if KIND == "int8":
        x = tl.where(x == x, x, 0.0)
        x = tl.minimum(tl.maximum(x, -127.0), 127.0)
        # Adding and subtracting this number rounds to an integer.
        y = ((x + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        MANTISSA: tl.constexpr = 3 if KIND == "e4m3" else 2
        BIAS: tl.constexpr = 120 if KIND == "e4m3" else 112  # of float32's exponent over the element's
        LARGEST: tl.constexpr = 448.0 if KIND == "e4m3" else 57344.0
        LEAST: tl.constexpr = 0.015625 if KIND == "e4m3" else 0.00006103515625  # the least normal number
        UNITS: tl.constexpr = 512.0 if KIND == "e4m3" else 65536.0  # of one below
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        a = tl.minimum(tl.abs(x), LARGEST)
        u = a.to(tl.int32, bitcast=True)
        DROPPED: tl.constexpr = 23 - MANTISSA
        normal = ((u + ((1 << (DROPPED - 1)) - 1) + ((u >> DROPPED) & 1)) >> DROPPED) - (BIAS << MANTISSA)
        units = tl.minimum(a * UNITS, 16.0)
        small = ((units + 12582912.0) - 12582912.0).to(tl.int32)
        found = tl.where(a < LEAST, small, normal)
        found = tl.where(x == x, found, 0x7F)
        y = (found | sign).to(tl.uint8)
    return y


@triton.jit
def stored_heads(x, scales, head, inside, KIND: tl.constexpr, to: tl.constexpr):
    """Rows ``x`` of heads [n, D] as they are stored: of the type ``to``, or divided by their heads' scales."""
    if KIND == "":
        y = x.to(to)
    else:
        scale = tl.load(scales + head, mask=inside, other=1.0)
        y = narrowed(tl.div_rn(x.to(tl.float32), tl.broadcast_to(scale[:, None], x.shape)), KIND)
    return y
