"""Activations rounded to elements of one byte, held as numbers of the compute dtype, which has each of them."""

import triton
import triton.language as tl

from evener_kernels_triton.jit.launch import fast_launch
from evener_kernels_triton.jit.rounded import row_scale


@triton.jit
def nearest_value(x, KIND: tl.constexpr):
    """float32 ``x`` as the value of the nearest element, to even if two are equally near; NaN stays NaN."""
    if KIND == "int8":
        # Adding and subtracting this number rounds to an integer.
        y = (tl.minimum(tl.maximum(x, -127.0), 127.0) + 12582912.0) - 12582912.0
    else:  # e4m3: three bits of mantissa, the least normal number is 2 to the -6
        a = tl.minimum(tl.abs(x), 448.0)
        u = a.to(tl.int32, bitcast=True)
        normal = (((u + 0x7FFFF + ((u >> 20) & 1)) >> 20) << 20).to(tl.float32, bitcast=True)
        units = tl.minimum(a * 512.0, 16.0)
        small = ((units + 12582912.0) - 12582912.0) * 0.001953125
        found = tl.where(a < 0.015625, small, normal)
        y = tl.where(x < 0.0, -found, found)
    return tl.where(x == x, y, x)


@fast_launch
@triton.jit
def round_values_kernel(
    x, y, factors, columns, x_row, SHARE: tl.constexpr, KIND: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y [tokens, columns] = SHARE times the elements nearest to x divided by its row's scale; ``factors`` [tokens] =
    the scales divided by SHARE. A program reads a row twice, CHUNK columns at a time: the second time it is in a
    cache."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0)
    row = token.to(tl.int64)
    at = tl.arange(0, CHUNK)
    scale = row_scale(x + row * x_row, columns, KIND, CHUNK)
    tl.store(factors + token + tl.arange(0, 1), scale / SHARE)
    wide = tl.broadcast_to(scale, [CHUNK])
    for first in range(0, columns, CHUNK):
        c = first + at
        v = tl.load(x + row * x_row + c, mask=c < columns, other=0.0).to(tl.float32)
        made = nearest_value(tl.div_rn(v, wide), KIND) * SHARE
        tl.store(y + row * columns + c, made.to(y.dtype.element_ty), mask=c < columns)
