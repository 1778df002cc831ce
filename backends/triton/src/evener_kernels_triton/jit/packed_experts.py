"""Products with packed matrices of a stack."""

import triton
import triton.language as tl

from evener_kernels_triton.jit.experts import gated
from evener_kernels_triton.jit.launch import fast_launch
from evener_kernels_triton.jit.packed import packed_sum


@fast_launch
@triton.jit
def gather_pairs_kernel(
    x, order, slots, y, columns, x_row, order_each, TOP: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """y [pairs, columns]: the row of x of each pair, its columns in the order of the pair's matrix. A pair without a
    matrix is not written."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    pair = tl.program_id(0)
    matrix = tl.load(slots + pair)
    if matrix >= 0:
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = c < columns
        place = tl.load(order + matrix.to(tl.int64) * order_each + c, mask=inside, other=0)
        source = pair // TOP if SHARE else pair
        v = tl.load(x + source.to(tl.int64) * x_row + place, mask=inside, other=0.0)
        tl.store(y + pair.to(tl.int64) * columns + c, v, mask=inside)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@fast_launch
@triton.jit
def packed_grouped_kernel(
    x, low, high, scales, tops, factors, bias, y, slots, lists, counts, tokens, room, rows, columns, spans, low_each,
    high_each, scales_each, tops_each, bias_each, x_row, y_row, alpha, limit,
    TOP: tl.constexpr, SHARE: tl.constexpr, ACT: tl.constexpr, FACTORS: tl.constexpr, BIAS: tl.constexpr,
    TP: tl.constexpr, ONE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, KIND: tl.constexpr, STYLE: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    BF16: tl.constexpr, UNITS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, WORDS: tl.constexpr,
    ADDED: tl.constexpr, PTX: tl.constexpr, SUMS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """As ``grouped_small_kernel``, whose names these are. ONE: there is one token, and a program takes one of its
    pairs; else a program takes one matrix and all of its pairs, BM at a time. FACTORS: products with a row of x are
    multiplied by that of ``factors``."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    across = tl.cdiv(rows, BN)
    matrix = tl.program_id(0) // across
    n = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    inside = n < rows
    halves: tl.constexpr = 1 if ACT == "" else 2
    gate_row = n * 2 if ACT == "clamped_swiglu" else n
    up_row = n * 2 + 1 if ACT == "clamped_swiglu" else rows + n
    t = tl.arange(0, BM)
    if ONE:
        only = matrix
        matrix = tl.load(slots + only)
        count = (matrix >= 0).to(tl.int32)
    elif TP > 0:
        rank = tl.arange(0, TP)
        place = t[:, None] * TOP + rank[None, :]
        hit = tl.load(slots + place, mask=(t < tokens)[:, None] & (rank < TOP)[None, :], other=-1) == matrix
        found = tl.sum(hit.to(tl.int32), 1)
        own_pair = tl.sum(tl.where(hit, place, 0), 1)
        count = tl.max(found, 0)  # one round, or none
    else:
        count = tl.load(counts + matrix)
    wide = matrix.to(tl.int64)
    for first in range(0, count, BM):
        if ONE:
            there = t < 1
            pair = tl.where(there, only, 0)
        elif TP > 0:
            there = found > 0
            pair = own_pair
        else:
            there = first + t < count
            pair = tl.load(lists + wide * room + first + t, mask=there, other=0)
        source = pair // TOP if SHARE else pair
        x_at = x + source.to(tl.int64)[None, :] * x_row
        acc = packed_sum(
            x_at, there[None, :], low + wide * low_each, high + wide * high_each, scales + wide * scales_each,
            tops + wide * tops_each, gate_row, inside, rows * halves, columns, 0, spans, KIND, STYLE, GROUP, ZERO,
            BF16, UNITS, LOW, HIGH, WORDS, ADDED, PTX, SUMS, EVEN, PRECISION, BM, BN,
        )  # fmt: skip
        if FACTORS:
            factor = tl.load(factors + source, mask=there, other=0.0)[None, :]
            acc *= factor
        if BIAS:
            acc += tl.load(bias + wide * bias_each + gate_row, mask=inside, other=0.0).to(tl.float32)[:, None]
        if ACT != "":
            up = packed_sum(
                x_at, there[None, :], low + wide * low_each, high + wide * high_each, scales + wide * scales_each,
                tops + wide * tops_each, up_row, inside, rows * halves, columns, 0, spans, KIND, STYLE, GROUP, ZERO,
                BF16, UNITS, LOW, HIGH, WORDS, ADDED, PTX, SUMS, EVEN, PRECISION, BM, BN,
            )  # fmt: skip
            if FACTORS:
                up *= factor
            if BIAS:
                up += tl.load(bias + wide * bias_each + up_row, mask=inside, other=0.0).to(tl.float32)[:, None]
            acc = gated(acc, up, alpha, limit, ACT)
        at = y + pair.to(tl.int64)[None, :] * y_row + n[:, None]
        tl.store(at, acc.to(y.dtype.element_ty), mask=there[None, :] & inside[:, None])
    # Dependents that start earlier would occupy units that this launch still needs.
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
