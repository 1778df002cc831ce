"""Products with matrices of a stack: many tokens or a few, sorted by matrix; and one token, with its routing in the
same launch."""

import triton
import triton.language as tl

from evener_kernels_triton.jit.launch import fast_launch
from evener_kernels_triton.jit.linear import parts_of, row_sums, tile
from evener_kernels_triton.jit.routing import chosen
from evener_kernels_triton.jit.rows import activate
from evener_kernels_triton.jit.stored import STEP, dropped, fours, lifted, row_scales, step_sums, widened


@triton.jit
def gated(gate, up, alpha, limit, ACT: tl.constexpr):
    """The activation between the two products of an expert, in float32; ``act_and_mul`` explains the names."""
    if ACT == "clamped_swiglu":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        y = gate * tl.sigmoid(alpha * gate) * up
    else:
        y = activate(gate, ACT) * up
    return y


@triton.jit
def _weights(own, row, c, columns, EVEN: tl.constexpr):
    """Rows of a matrix [len(row), len(c)]."""
    at = own + row[:, None] * columns + c[None, :]
    return tl.load(at) if EVEN else tl.load(at, mask=(c < columns)[None, :], other=0)


@triton.jit
def _rows_of(at, there, c, columns, EVEN: tl.constexpr):
    """Columns ``c`` of the rows at ``at``; rows that do not exist are masked."""
    mask = there[:, None] if EVEN else there[:, None] & (c < columns)[None, :]
    return tl.load(at + c[None, :], mask=mask, other=0.0)


@triton.jit
def _add_product(
    acc, own, scales, row, inside, k, columns, blocks, a,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr, HIGH: tl.constexpr,
    WIDE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """acc + BK columns of rows ``row`` from column ``k``, times ``a``. Scales of whole rows are left to the caller."""
    left = widened(_weights(own, row, k + tl.arange(0, BK), columns, EVEN), KIND, PTX, a.dtype)
    if KIND != "" and WIDE > 0:
        scale = row_scales(scales, row, inside, blocks, k, HIGH, WIDE)
        acc += tl.dot(left, a, input_precision=PRECISION) * scale[:, None]
    else:
        acc = tl.dot(left, a, acc, input_precision=PRECISION)
    return acc


@fast_launch
@triton.jit
def grouped_small_kernel(
    x, w, scales, bias, y, slots, lists, counts, tokens, room, rows, columns, blocks, scale_each, x_row, y_row, alpha,
    limit,
    TOP: tl.constexpr, SHARE: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, TP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    KIND: tl.constexpr, PTX: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y[p] = w[slots[p]] @ x[p] for few pairs per matrix: a program takes BN rows of one matrix, BM pairs at a time.
    SHARE: x has one row for the TOP pairs of a token. ACT: matrices have 2 * rows rows, which ``gated`` combines.
    TP: if not 0, there are at most BM tokens, TP is at least TOP, and each program searches them for its own pairs.

    The weights are the left operand: matrix units take 64 rows on the left, and few on the right.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    across = tl.cdiv(rows, BN)
    matrix = tl.program_id(0) // across
    n = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    # Rows past the end wrap around and are not stored: loads without a mask are copied faster.
    inside = n < rows
    safe = tl.where(inside, n, 0)
    gate_row = safe * 2 if ACT == "clamped_swiglu" else safe
    up_row = safe * 2 + 1 if ACT == "clamped_swiglu" else rows + safe
    halves: tl.constexpr = 1 if ACT == "" else 2
    own = w + matrix.to(tl.int64) * rows * halves * columns
    own_bias = bias + matrix.to(tl.int64) * rows * halves
    own_scales = scales + matrix.to(tl.int64) * scale_each
    if TP > 0:
        t = tl.arange(0, BM)
        rank = tl.arange(0, TP)
        place = t[:, None] * TOP + rank[None, :]
        hit = tl.load(slots + place, mask=(t < tokens)[:, None] & (rank < TOP)[None, :], other=-1) == matrix
        found = tl.sum(hit.to(tl.int32), 1)
        own_pair = tl.sum(tl.where(hit, place, 0), 1)
        count = tl.max(found, 0)  # one round, or none
    else:
        count = tl.load(counts + matrix)
    for first in range(0, count, BM):
        if TP > 0:
            there = found > 0
            pair = own_pair
        else:
            m = first + tl.arange(0, BM)
            there = m < count
            pair = tl.load(lists + matrix.to(tl.int64) * room + m, mask=there, other=0)
        source = pair // TOP if SHARE else pair
        x_at = x + source.to(tl.int64)[:, None] * x_row
        acc = tl.zeros([BN, BM], tl.float32)
        high = acc
        for k in range(0, columns, BK):
            c = k + tl.arange(0, BK)
            a = tl.trans(_rows_of(x_at, there, c, columns, EVEN))
            acc = _add_product(
                acc, own, own_scales, gate_row, inside, k, columns, blocks, a, EVEN, PRECISION, KIND, PTX, HIGH, WIDE,
                BK,
            )  # fmt: skip
            if ACT != "":
                high = _add_product(
                    high, own, own_scales, up_row, inside, k, columns, blocks, a, EVEN, PRECISION, KIND, PTX, HIGH,
                    WIDE, BK,
                )  # fmt: skip
        if KIND != "" and WIDE == 0:
            acc *= row_scales(own_scales, gate_row, inside, blocks, 0, HIGH, WIDE)[:, None]
            if ACT != "":
                high *= row_scales(own_scales, up_row, inside, blocks, 0, HIGH, WIDE)[:, None]
        if BIAS:
            acc += tl.load(own_bias + gate_row).to(tl.float32)[:, None]
            if ACT != "":
                high += tl.load(own_bias + up_row).to(tl.float32)[:, None]
        if ACT != "":
            acc = gated(acc, high, alpha, limit, ACT)
        at = y + pair.to(tl.int64)[None, :] * y_row + n[:, None]
        tl.store(at, acc.to(y.dtype.element_ty), mask=there[None, :] & inside[:, None])
    # Dependents that start earlier would occupy units that this launch still needs.
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@fast_launch
@triton.jit
def grouped_large_kernel(
    x, w, scales, bias, y, lists, counts, experts, room, rows, columns, blocks, scale_each, x_row, y_row, alpha, limit,
    TOP: tl.constexpr, SHARE: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, EP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    KIND: tl.constexpr, PTX: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The same for many pairs per matrix: BM pairs and BN rows for each program. Tiles are numbered over all lists; the
    grid has the largest number of tiles that is possible.

    With ACT, gate and up rows alternate in one tile: one wide product, in which one thread holds neighbouring columns.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    halves: tl.constexpr = 1 if ACT == "" else 2
    across = tl.cdiv(rows, BN)
    tile = tl.program_id(0) // across
    start = (tl.program_id(0) % across) * BN
    e = tl.arange(0, EP)
    each = tl.load(counts + e, mask=e < experts, other=0)
    tiles = tl.cdiv(each, BM)
    ends = tl.cumsum(tiles, 0)
    matrix = tl.sum((ends <= tile).to(tl.int32), 0)
    if matrix < experts:
        mine = e == matrix
        m = (tile - tl.sum(tl.where(mine, ends - tiles, 0), 0)) * BM + tl.arange(0, BM)
        there = m < tl.sum(tl.where(mine, each, 0), 0)
        pair = tl.load(lists + matrix.to(tl.int64) * room + m, mask=there, other=0)
        r = tl.arange(0, BN * halves)
        safe = tl.where(start + r // halves < rows, start + r // halves, 0)
        row = safe
        if ACT == "clamped_swiglu":
            row = safe * 2 + r % 2
        elif ACT != "":
            row = safe + (r % 2) * rows
        own = w + matrix.to(tl.int64) * rows * halves * columns
        own_scales = scales + matrix.to(tl.int64) * scale_each
        source = pair // TOP if SHARE else pair
        x_at = x + source.to(tl.int64)[:, None] * x_row
        acc = tl.zeros([BM, BN * halves], tl.float32)
        for k in range(0, columns, BK):
            c = k + tl.arange(0, BK)
            a = _rows_of(x_at, there, c, columns, EVEN)
            right = tl.trans(widened(_weights(own, row, c, columns, EVEN), KIND, PTX, x.dtype.element_ty))
            if KIND != "" and WIDE > 0:
                scale = row_scales(own_scales, row, row >= 0, blocks, k, HIGH, WIDE)
                acc += tl.dot(a, right, input_precision=PRECISION) * scale[None, :]
            else:
                acc = tl.dot(a, right, acc, input_precision=PRECISION)
        if KIND != "" and WIDE == 0:
            acc *= row_scales(own_scales, row, row >= 0, blocks, 0, HIGH, WIDE)[None, :]
        if BIAS:
            acc += tl.load(bias + matrix.to(tl.int64) * rows * halves + row).to(tl.float32)[None, :]
        if ACT != "":
            gate, up = tl.split(tl.reshape(acc, (BM, BN, 2)))
            acc = gated(gate, up, alpha, limit, ACT)
        n = start + tl.arange(0, BN)
        at = y + pair.to(tl.int64)[:, None] * y_row + n[None, :]
        tl.store(at, acc.to(y.dtype.element_ty), mask=there[:, None] & (n < rows)[None, :])
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@fast_launch
@triton.jit
def mix_kernel(
    x, weights, slots, extra, gate, y, hidden, x_row, x_each, extra_row,
    SOME: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, TOP: tl.constexpr, TP: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """y[t] = Σ_k weights[t, k] * x[t, k] in float32, BLOCK columns of one token a program. SOME: pairs without a
    slot are left out. ADD: + extra[t]; GATE: that times sigmoid(gate[t])."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < hidden
    k = tl.arange(0, TP)
    weight = tl.load(weights + token * TOP + k, mask=k < TOP, other=0.0)
    each = x + token * x_row + k[:, None] * x_each + at[None, :]
    asked = k < TOP
    if SOME:
        asked = asked & (tl.load(slots + token * TOP + k, mask=asked, other=-1) >= 0)
    v = tl.load(each, mask=asked[:, None] & inside[None, :], other=0.0).to(tl.float32)
    r = tl.sum(v * weight[:, None], 0)
    if ADD:
        more = tl.load(extra + token * extra_row + at, mask=inside, other=0.0).to(tl.float32)
        if GATE:
            more = more * tl.sigmoid(tl.load(gate + token).to(tl.float32))
        r += more
    tl.store(y + token * hidden + at, r.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _own_slot(
    logits, correction, slots, k, most, scale,
    CORRECT: tl.constexpr, SCORING: tl.constexpr, TOP: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, RENORMALIZE: tl.constexpr, GP: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """The slot of choice ``k``."""
    expert, rank, taken, _ = chosen(
        logits, 0, logits, correction, scale, 1, False, CORRECT, SCORING, TOP, GROUPS, EACH, TOP_GROUPS, GROUP_BEST,
        RENORMALIZE, GP, EP, False,
    )  # fmt: skip
    return tl.load(slots + tl.sum(tl.where(taken & (rank == k), expert, 0), 0) * most)


@fast_launch
@triton.jit
def single_token_up_kernel(
    logits, correction, slots, x, gain, w, scales, bias, shared, y, most, rows, columns, blocks, scale_each, scale, eps,
    offset, alpha, limit,
    BIAS: tl.constexpr, ACT: tl.constexpr, EXTRA: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    OVERLAP: tl.constexpr, KIND: tl.constexpr, CAST: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    CORRECT: tl.constexpr, SCORING: tl.constexpr, TOP: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, RENORMALIZE: tl.constexpr, GP: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """One token: y[k] = gated(w[slot of choice k] @ norm(x)). Program (k, first rows) loops over the rows of its matrix
    and computes norm(x) once; each program does the routing itself, which is cheaper than a launch.

    EXTRA: so many more choices are always made: choice TOP + i is the i-th piece of ``rows`` gate rows and ``rows`` up
    rows of ``shared`` [2 * EXTRA * rows, columns], plain numbers. Its first rows are loaded before the kernel waits.

    The next kernel may start after this one has waited: it reads ``logits`` before it waits.
    """
    k = tl.program_id(0)
    c = tl.arange(0, BK)
    real = c < columns
    step = tl.num_programs(1) * BN
    start = tl.program_id(1) * BN
    n = start + tl.arange(0, BN)
    halves: tl.constexpr = 2
    gate_row = n * 2 if ACT == "clamped_swiglu" else n
    if EXTRA > 0:
        if k < TOP:
            if OVERLAP:
                tl.extra.cuda.gdc_wait()
                tl.extra.cuda.gdc_launch_dependents()
            slot = _own_slot(
                logits, correction, slots, k, most, scale, CORRECT, SCORING, TOP, GROUPS, EACH, TOP_GROUPS, GROUP_BEST,
                RENORMALIZE, GP, EP,
            )  # fmt: skip
            readable = tl.where(slot >= 0, rows, 0)
            own = w + slot.to(tl.int64) * (rows * halves * columns)
            further = rows
            a, s = tile(own, scales, n, n < readable, 0, columns, blocks, KIND, HIGH, WIDE, BK, False)
            u, t = tile(own, scales, further + n, n < readable, 0, columns, blocks, KIND, HIGH, WIDE, BK, False)
        else:
            slot = k * 0
            readable = rows + slot
            own = shared + (k - TOP).to(tl.int64) * (rows * columns)
            further = rows * EXTRA
            a, s = tile(own, scales, n, n < readable, 0, columns, blocks, KIND, HIGH, WIDE, BK, False)
            u, t = tile(own, scales, further + n, n < readable, 0, columns, blocks, KIND, HIGH, WIDE, BK, False)
            if OVERLAP:
                tl.extra.cuda.gdc_wait()
                tl.extra.cuda.gdc_launch_dependents()
        own_scales = scales
    else:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        slot = _own_slot(
            logits, correction, slots, k, most, scale, CORRECT, SCORING, TOP, GROUPS, EACH, TOP_GROUPS, GROUP_BEST,
            RENORMALIZE, GP, EP,
        )  # fmt: skip
        readable = tl.where(slot >= 0, rows, 0)
        own = w + slot.to(tl.int64) * (rows * halves * (columns if KIND == "" else columns // 4))
        own_scales = scales + slot.to(tl.int64) * scale_each
        further = rows
        up_row = n * 2 + 1 if ACT == "clamped_swiglu" else further + n
        a, s = tile(own, own_scales, gate_row, n < readable, 0, columns, blocks, KIND, HIGH, WIDE, BK, False)
        u, t = tile(own, own_scales, up_row, n < readable, 0, columns, blocks, KIND, HIGH, WIDE, BK, False)
    b = tl.load(x + c, mask=real, other=0.0).to(tl.float32)
    b = b * tl.rsqrt(tl.sum(b * b, 0) / columns + eps)
    b *= tl.load(gain + c, mask=real, other=0.0).to(tl.float32) + offset
    b, b1, b2, b3 = parts_of(b, KIND, CAST)
    for first in range(start, rows, step):
        coming = first + step + tl.arange(0, BN)
        there = coming < readable
        gate_row = coming * 2 if ACT == "clamped_swiglu" else coming
        up_row = coming * 2 + 1 if ACT == "clamped_swiglu" else further + coming
        a_next, s_next = tile(own, own_scales, gate_row, there, 0, columns, blocks, KIND, HIGH, WIDE, BK, False)
        u_next, t_next = tile(own, own_scales, up_row, there, 0, columns, blocks, KIND, HIGH, WIDE, BK, False)
        n = first + tl.arange(0, BN)
        inside = n < rows
        gate_row = n * 2 if ACT == "clamped_swiglu" else n
        up_row = n * 2 + 1 if ACT == "clamped_swiglu" else rows + n
        gate = row_sums(a, s, b, b1, b2, b3, KIND, CAST)
        up = row_sums(u, t, b, b1, b2, b3, KIND, CAST)
        if BIAS:
            own_bias = bias + slot.to(tl.int64) * rows * halves
            gate += tl.load(own_bias + gate_row, mask=n < readable, other=0.0).to(tl.float32)
            up += tl.load(own_bias + up_row, mask=n < readable, other=0.0).to(tl.float32)
        r = gated(gate, up, alpha, limit, ACT)
        tl.store(y + k * rows + n, r.to(y.dtype.element_ty), mask=inside)
        a = a_next
        u = u_next
        s = s_next
        t = t_next


@triton.jit
def _load_down_weights(lines, live, inner, first, KIND: tl.constexpr, BK: tl.constexpr):
    """Weights [BN, TP, BK] of the lines at ``lines`` [BN, TP], ``live`` ones, from column ``first``; four to a word of
    stored elements."""
    each: tl.constexpr = 1 if KIND == "" else 4
    c = first // each + tl.arange(0, BK // each)
    mask = live[:, :, None] & (c < inner // each)[None, None, :]
    return tl.load(lines[:, :, None] + c[None, None, :], mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def _down_scales(
    scales, n, slot, hidden, blocks, scale_each, first, HIGH: tl.constexpr, WIDE: tl.constexpr, BK: tl.constexpr
):
    """As ``step_scales``, of output rows ``n`` and matrices ``slot``, from column ``first``: [BN, TP, BK / STEP or
    1]."""
    g = (first + tl.arange(0, BK // STEP) * STEP) // WIDE if WIDE > 0 else tl.arange(0, 1)
    at = scales + slot.to(tl.int64)[None, :, None] * scale_each + ((n // HIGH) * blocks)[:, None, None]
    mask = (n < hidden)[:, None, None] & (slot >= 0)[None, :, None] & (g < blocks)[None, None, :]
    return tl.load(at + g[None, None, :], mask=mask, other=0.0)


@triton.jit
def _accumulate(
    acc, a, x, k, first, inner, scales, n, slot, hidden, blocks, scale_each,
    LINES: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr, CAST: tl.constexpr, HIGH: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Add BK columns from ``first``, whose weights are ``a``, to the sums: [BN, TP, BK], or [BN, TP, BK / STEP] of
    stored elements."""
    c = first + tl.arange(0, BK)
    b = tl.load(x + k[:, None] * inner + c[None, :], mask=(k < LINES)[:, None] & (c < inner)[None, :], other=0.0)
    if KIND == "":
        y = acc + a.to(tl.float32) * b.to(tl.float32)[None, :, :]
    else:
        b0, b1, b2, b3 = fours(lifted(b.to(tl.float32), KIND, CAST))
        sums = step_sums(a, b0[None, :, :], b1[None, :, :], b2[None, :, :], b3[None, :, :], KIND, CAST)
        y = acc + sums * _down_scales(scales, n, slot, hidden, blocks, scale_each, first, HIGH, WIDE, BK)
    return y


@fast_launch
@triton.jit
def single_token_down_kernel(
    logits, correction, slots, x, w, scales, bias, shared, extra, gate, y, most, hidden, inner, blocks, scale_each,
    scale,
    BIAS: tl.constexpr, EXTRA: tl.constexpr, ALIGNED: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr,
    TP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, ROLL: tl.constexpr,
    OVERLAP: tl.constexpr, KIND: tl.constexpr, CAST: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    CORRECT: tl.constexpr, SCORING: tl.constexpr, TOP: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, RENORMALIZE: tl.constexpr, GP: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """One token: y = Σ_k weight of choice k * (w[its slot] @ x[k]), BN rows of all matrices for each program; extra and
    gate as in ``mix_kernel``. The first AHEAD (1 to 3) tiles of columns are loaded before the kernel waits: the
    previous kernel has already waited for ``logits``. ROLL: from then on three tiles stay under way.

    EXTRA: choice TOP + i has x[TOP + i], the i-th piece of ``inner`` columns of ``shared`` [hidden, EXTRA * inner], and
    a weight of 1, or the gate's. ALIGNED: every line of ``w`` and ``shared`` begins at a multiple of 16 bytes."""
    expert, rank, taken, weight = chosen(
        logits, 0, logits, correction, scale, 1, False, CORRECT, SCORING, TOP, GROUPS, EACH, TOP_GROUPS, GROUP_BEST,
        RENORMALIZE, GP, EP, False,
    )  # fmt: skip
    LINES: tl.constexpr = TOP + EXTRA
    k = tl.arange(0, TP)
    match = taken[None, :] & (rank[None, :] == k[:, None])
    mine = tl.sum(tl.where(match, expert[None, :], 0), 1)
    share = tl.sum(tl.where(match, weight[None, :], 0.0), 1)
    slot = tl.load(slots + mine * most, mask=k < TOP, other=-1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < hidden
    wide = inner if KIND == "" else inner // 4
    if EXTRA > 0:
        always = (k >= TOP) & (k < LINES)
        own = tl.where(always, shared + (k - TOP) * inner, w + slot.to(tl.int64) * hidden * inner)
        if ALIGNED:  # the compiler does not see it through the choice, and would load one number at a time
            own = tl.multiple_of(own, 16)
        slot = tl.where(always, 0, slot)
        lines = own[None, :] + inner * (n[:, None] * tl.where(always, EXTRA, 1)[None, :])
    else:
        lines = w + (slot.to(tl.int64) * hidden * wide)[None, :] + (n * wide)[:, None]
    live = inside[:, None] & (slot >= 0)[None, :]
    a0 = _load_down_weights(lines, live, inner, 0, KIND, BK)
    if AHEAD > 1:
        a1 = _load_down_weights(lines, live, inner, BK, KIND, BK)
    if AHEAD > 2:
        a2 = _load_down_weights(lines, live, inner, 2 * BK, KIND, BK)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([BN, TP, BK if KIND == "" else BK // STEP], tl.float32)
    if ROLL and AHEAD > 2:
        for first in range(0, inner, BK):
            a3 = _load_down_weights(lines, live, inner, first + 3 * BK, KIND, BK)
            acc = _accumulate(
                acc, a0, x, k, first, inner, scales, n, slot, hidden, blocks, scale_each, LINES, BK, KIND, CAST, HIGH,
                WIDE,
            )  # fmt: skip
            a0 = a1
            a1 = a2
            a2 = a3
    else:
        acc = _accumulate(
            acc, a0, x, k, 0, inner, scales, n, slot, hidden, blocks, scale_each, LINES, BK, KIND, CAST, HIGH, WIDE
        )
        if AHEAD > 1:
            acc = _accumulate(
                acc, a1, x, k, BK, inner, scales, n, slot, hidden, blocks, scale_each, LINES, BK, KIND, CAST, HIGH, WIDE
            )
        if AHEAD > 2:
            acc = _accumulate(
                acc, a2, x, k, 2 * BK, inner, scales, n, slot, hidden, blocks, scale_each, LINES, BK, KIND, CAST, HIGH,
                WIDE,
            )  # fmt: skip
        for first in range(AHEAD * BK, inner, BK):
            a = _load_down_weights(lines, live, inner, first, KIND, BK)
            acc = _accumulate(
                acc, a, x, k, first, inner, scales, n, slot, hidden, blocks, scale_each, LINES, BK, KIND, CAST, HIGH,
                WIDE,
            )  # fmt: skip
    each = dropped(tl.sum(acc, 2), KIND, CAST)
    if BIAS:
        at = slot.to(tl.int64)[None, :] * hidden + n[:, None]
        each += tl.load(bias + at, mask=(slot >= 0)[None, :] & inside[:, None], other=0.0).to(tl.float32)
    part = 1.0
    if GATE:
        part = tl.sigmoid(tl.load(gate).to(tl.float32))
    if EXTRA > 0:
        share = tl.where(always, part, share)
    r = tl.sum(each * share[None, :], 1)
    if ADD:
        r += tl.load(extra + n, mask=inside, other=0.0).to(tl.float32) * part
    tl.store(y + n, r.to(y.dtype.element_ty), mask=inside)
