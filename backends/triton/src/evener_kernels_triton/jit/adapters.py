"""Products of rows with low-rank matrices, each row with those of its own adapter (Chen et al. 2023, Punica)."""

import triton
import triton.language as tl

from evener_kernels_triton.jit.launch import fast_launch


@fast_launch
@triton.jit
def adapters_down_kernel(
    x, down, index, inner, tokens, x_row, columns, width,
    SLOTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """inner[t] = x[t] @ down[index[t]]ᵀ in float32, zeros for -1. x is [tokens, columns], down [SLOTS, width, columns],
    inner [tokens, width].

    A program takes BM rows and BN numbers of each. It goes through the adapters and computes those that a row has: in a
    prompt's rows that is one, in a step that decodes it is as many as there are.
    """
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    c = tl.arange(0, BK)
    real, inside = m < tokens, n < width
    own = tl.load(index + m, mask=real, other=-1)
    rows = x + m.to(tl.int64)[:, None] * x_row
    sums = tl.zeros([BM, BN], tl.float32)
    for slot in range(SLOTS):
        mine = own == slot
        if tl.max(mine.to(tl.int32), 0) > 0:
            matrix = down + (slot * width + n).to(tl.int64)[None, :] * columns
            found = tl.zeros([BM, BN], tl.float32)
            for k in range(0, columns, BK):
                there = k + c < columns
                a = tl.load(rows + (k + c)[None, :], mask=mine[:, None] & there[None, :], other=0.0)
                b = tl.load(matrix + (k + c)[:, None], mask=there[:, None] & inside[None, :], other=0.0)
                found = tl.dot(a, b, found, input_precision=PRECISION)
            sums = tl.where(mine[:, None], found, sums)  # not their sum: others may be infinite
    at = inner + m.to(tl.int64)[:, None] * width + n[None, :]
    tl.store(at, sums, mask=real[:, None] & inside[None, :])


@fast_launch
@triton.jit
def adapters_up_kernel(
    y, inner, up, index, tokens, y_row, width, rows, first, last, offset,
    SLOTS: tl.constexpr, RANK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y[t, first:last] += inner[t, offset:offset + RANK] @ up[index[t], first:last]ᵀ; rows with -1 stay as they are. y
    is [tokens, …], inner [tokens, width] of float32, up [SLOTS, rows, RANK]. BR is at least RANK."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = first + tl.program_id(1) * BN + tl.arange(0, BN)
    r = tl.arange(0, BR)
    real, inside, there = m < tokens, n < last, r < RANK
    own = tl.load(index + m, mask=real, other=-1)
    at = inner + m.to(tl.int64)[:, None] * width + offset + r[None, :]
    sums = tl.zeros([BM, BN], tl.float32)
    for slot in range(SLOTS):
        mine = own == slot
        if tl.max(mine.to(tl.int32), 0) > 0:
            a = tl.load(at, mask=mine[:, None] & there[None, :], other=0.0)
            matrix = up + (slot * rows + n).to(tl.int64)[None, :] * RANK
            b = tl.load(matrix + r[:, None], mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)
            sums = tl.where(mine[:, None], tl.dot(a, b, input_precision=PRECISION), sums)
    out = y + m.to(tl.int64)[:, None] * y_row + n[None, :]
    changed = (own >= 0)[:, None] & inside[None, :]
    before = tl.load(out, mask=changed, other=0.0).to(tl.float32)
    tl.store(out, (before + sums).to(y.dtype.element_ty), mask=changed)
