"""Products of few tokens with weights in float8_e4m3fn and rounded activations, for devices whose products of warp
groups take such numbers from shared memory (Hopper).

A program copies its rows of the weight asynchronously into a ring of shared memory, and has filled the ring before it
waits for the launch that rounds the activations. Sums of 128 columns are scaled and added in float32: the matrix unit
itself keeps fewer bits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from evener_kernels_triton.jit.launch import fast_launch
from evener_kernels_triton.jit.prefill_attention import RENAMED, _sync
from evener_kernels_triton.jit.stored_token import _activate

# A name that changed between versions of the compiler.
_begin_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

#: Columns of a step, which have one scale.
SPAN = gl.constexpr(128)


@gluon.jit
def _copy(ring, lines, step, stop, place, U: gl.constexpr, EVEN: gl.constexpr, LANES: gl.constexpr):
    """Begin to copy U steps of the lines [rows, 1] into a place of the ring, up to column ``stop``."""
    for u in gl.static_range(U):
        c = (step + u) * SPAN + gl.arange(0, SPAN, gl.SliceLayout(0, LANES))[None, :]
        if EVEN:
            _begin_copy(ring.index(place * U + u), lines + c)
        else:
            _begin_copy(ring.index(place * U + u), lines + c, mask=c < stop)


@gluon.jit
def _of_weight(
    w_scales, row, rows, start, stop, blocks, HIGH: gl.constexpr, STEPS: gl.constexpr, FACTORS: gl.constexpr
):  # fmt: skip
    """Scales of the weight of steps: [STEPS], of the block with ``row``."""
    step = start + gl.arange(0, STEPS, gl.SliceLayout(1, FACTORS))
    return gl.load(w_scales + row // HIGH * blocks + step, mask=(step < stop) & (row < rows), other=0.0)


@gluon.jit
def _of_tokens(x_scales, held, start, stop, STEPS: gl.constexpr, BM: gl.constexpr, FACTORS: gl.constexpr):
    """Scales of tokens of steps: [STEPS, BM]."""
    step = start + gl.arange(0, STEPS, gl.SliceLayout(1, FACTORS))
    m = gl.arange(0, BM, gl.SliceLayout(0, FACTORS))
    inside = (step < stop)[:, None] & (m < held)[None, :]
    return gl.load(x_scales + step[:, None] * held + m[None, :], mask=inside, other=0.0)


@gluon.jit
def _by_step(scaled, half: gl.constexpr, STEPS: gl.constexpr, BM: gl.constexpr, ROWS: gl.constexpr):
    """Factors of half a tile as a row for each step."""
    if RENAMED:
        factors = scaled.index(half).reinterpret(gl.float32, [STEPS, 1, BM], ROWS)
    else:
        factors = scaled.index(half)._reinterpret(gl.float32, [STEPS, 1, BM], ROWS)
    return factors


@gluon.jit
def _factor(low, high, step, lines, C: gl.constexpr, HALVES: gl.constexpr):
    """What the sums of a step are multiplied by."""
    f = low.index(step).load(C)
    if HALVES == 2:
        f = gl.where(lines[:, None] < SPAN, f, high.index(step).load(C))
    return f


@gluon.jit
def _product(w_ring, x_ring, place, u, BN: gl.constexpr, BM: gl.constexpr, C: gl.constexpr):
    """Begin the product of a step of a place of the rings."""
    none = gl.zeros([BN, BM], gl.float32, C)
    return warpgroup_mma(
        w_ring.index(place + u), x_ring.index(place + u).permute((1, 0)), none, use_acc=False, is_async=True
    )


@gluon.jit
def _sum_of_spans(acc, parts, arrived, n, m, BN: gl.constexpr, BM: gl.constexpr, SPLITS: gl.constexpr):
    """As ``jit.arrival.sum_of_spans``, with spans on axis 1 of the grid."""
    finish = True
    if SPLITS > 1:
        tile = gl.program_id(0)
        own = parts + tile * (SPLITS * BN * BM) + n[:, None] * BM + m[None, :]
        gl.store(own + gl.program_id(1) * (BN * BM), acc)
        _sync()
        before = gl.atomic_add(arrived + tile, 1, sem="acq_rel")
        finish = before == SPLITS - 1
        if finish:
            gl.store(arrived + tile, 0)
            acc = gl.load(own, cache_modifier=".cg")
            for other in gl.static_range(1, SPLITS):
                acc += gl.load(own + other * (BN * BM), cache_modifier=".cg")
    return acc, finish


@gluon.jit
def _store(
    acc, x_scales, w_scales, bias, y, first, held, rows, BIAS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BLOCKS: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Store a tile's results from its sums."""
    RESULT: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, BN // 16], [0, 1])
    sums = gl.convert_layout(acc, RESULT)
    o = first + gl.arange(0, BN, gl.SliceLayout(1, RESULT))
    t = gl.arange(0, BM, gl.SliceLayout(0, RESULT))
    inside = o < rows
    if not BLOCKS:
        of_x = gl.load(x_scales + (t * 0 if FIXED else t), mask=t < held, other=0.0)
        sums *= gl.load(w_scales + o, mask=inside, other=0.0)[:, None] * of_x[None, :]
    if BIAS:
        sums += gl.load(bias + o, mask=inside, other=0.0).to(gl.float32)[:, None]
    at = t[None, :].to(gl.int64) * rows + o[:, None]
    gl.store(y + at, sums.to(y.dtype.element_ty), mask=inside[:, None] & (t < held)[None, :])


@gluon.jit
def _store_activated(
    acc, y, scales, first, held, rows, ACT: gl.constexpr, BM: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Activate 128 gate rows, multiply them by as many up rows, and store them rounded."""
    PAIRS: gl.constexpr = gl.BlockedLayout([4, 1, 2], [32, 1, 1], [1, WARPS, 1], [2, 0, 1])
    RESULT: gl.constexpr = gl.SliceLayout(2, PAIRS)
    gate, up = gl.split(gl.convert_layout(gl.permute(gl.reshape(acc, [2, SPAN, BM]), (1, 2, 0)), PAIRS))
    values = (_activate(gate, ACT) * up).to(gl.bfloat16).to(gl.float32)
    scale = gl.maximum(gl.max(gl.abs(values), 0), 1e-10) / 448.0
    made = (values / scale[None, :]).to(gl.float8e4nv)
    n = first + gl.arange(0, SPAN, gl.SliceLayout(1, RESULT))
    m = gl.arange(0, BM, gl.SliceLayout(0, RESULT))
    gl.store(scales + first // SPAN * held + m, scale, mask=m < held)
    gl.store(y + m[None, :].to(gl.int64) * rows + n[:, None], made, mask=(n < rows)[:, None] & (m < held)[None, :])


@fast_launch
@gluon.jit
def rounded_few_kernel(
    x, x_scales, w, w_scales, bias, y, parts, arrived, held, rows, columns, blocks,
    made_scales, each, BIAS: gl.constexpr, ACT: gl.constexpr, SPLITS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    U: gl.constexpr, PLACES: gl.constexpr, STEPS: gl.constexpr, EVEN: gl.constexpr, HIGH: gl.constexpr,
    BLOCKS: gl.constexpr, FIXED: gl.constexpr, EARLY: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """y [held, rows] = x @ wᵀ for all tokens, up to BM, and BN rows a program; columns are cut into SPLITS spans of
    ``each`` steps of 128, a multiple of U, which a place of the ring has.

    ACT: w has ``rows`` up rows after as many gate rows. A program has 128 of each, and y is float8_e4m3fn, rounded with
    scales of 128 columns, float32 [rows / 128, held], which go to ``made_scales``. One span of columns, and no bias.

    Args:
        x: float8_e4m3fn [held, columns]. x_scales: float32 [columns / 128, held] with BLOCKS, else [held], or [1] with
            FIXED.
        w_scales: float32 [rows / HIGH, blocks] with BLOCKS, where HIGH is a multiple of BN or 128, else [rows].
        STEPS: a power of two, at least ``each``.
        EARLY: the next launch is let in at the start, not when the weights are read.
    """
    WARPS: gl.constexpr = BN // 16
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 32])
    LANES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    FACTORS: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BM, BM // 4], [WARPS, 1], [1, 0])
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if OVERLAP and EARLY:
        gdc_launch_dependents()
    w_ring = gl.allocate_shared_memory(gl.float8e4nv, [PLACES * U, BN, SPAN], SHARED)
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [PLACES * U, BM, SPAN], SHARED)
    # Lines of a tile of 256 are two halves, whose rows are ``apart``.
    HALVES: gl.constexpr = BN // SPAN if BN > SPAN else 1
    TALL: gl.constexpr = BN // HALVES
    first = gl.program_id(0) * (TALL if ACT != "" else BN)
    apart = rows if ACT != "" else TALL
    start = gl.program_id(1) * each
    stop = gl.minimum(start + each, (columns + SPAN - 1) // SPAN)
    line = gl.arange(0, BN, gl.SliceLayout(1, LANES))
    # Rows and tokens past the end are those of the beginning, and not stored.
    all = rows * 2 if ACT != "" else rows
    row = first + line % TALL + line // TALL * apart
    line = gl.where(row < all, row, 0)
    w_lines = w + line.to(gl.int64)[:, None] * columns
    for place in gl.static_range(PLACES - 1):
        _copy(w_ring, w_lines, start + place * U, columns, place, U, EVEN, LANES)
        async_copy.commit_group()
    if BLOCKS:
        scaled = gl.allocate_shared_memory(gl.float32, [HALVES, STEPS, BM], ROWS)
        left = _of_weight(w_scales, first, all, start, stop, blocks, HIGH, STEPS, FACTORS)
        right = _of_weight(w_scales, first + apart, all, start, stop, blocks, HIGH, STEPS, FACTORS)
        if OVERLAP:
            gdc_wait()
        of_tokens = _of_tokens(x_scales, held, start, stop, STEPS, BM, FACTORS)
        scaled.index(0).store(left[:, None] * of_tokens)
        scaled.index(HALVES - 1).store((left if HALVES == 1 else right)[:, None] * of_tokens)
        low = _by_step(scaled, 0, STEPS, BM, ROWS)
        high = _by_step(scaled, HALVES - 1, STEPS, BM, ROWS)
    elif OVERLAP:
        gdc_wait()
    token = gl.arange(0, BM, gl.SliceLayout(1, LANES))
    token = gl.where(token < held, token, 0)
    x_lines = x + token[:, None] * columns
    for place in gl.static_range(PLACES - 1):
        _copy(x_ring, x_lines, start + place * U, columns, place, U, EVEN, LANES)
        async_copy.commit_group()
    lines = gl.arange(0, BN, gl.SliceLayout(1, C))
    acc = gl.zeros([BN, BM], gl.float32, C)
    place = 0
    free = PLACES - 1
    for step in range(start, stop, U):
        async_copy.wait_group(PLACES - 2)
        fence_async_shared()
        d = _product(w_ring, x_ring, place * U, 0, BN, BM, C)
        e = d
        if U == 2:
            e = _product(w_ring, x_ring, place * U, 1, BN, BM, C)
        coming = step + (PLACES - 1) * U
        if coming < stop:
            _copy(w_ring, w_lines, coming, columns, free, U, EVEN, LANES)
            _copy(x_ring, x_lines, coming, columns, free, U, EVEN, LANES)
        async_copy.commit_group()
        place = gl.where(place == PLACES - 1, 0, place + 1)
        free = gl.where(free == PLACES - 1, 0, free + 1)
        if U == 2:
            d, e = warpgroup_mma_wait(0, deps=[d, e])
        else:
            d = warpgroup_mma_wait(0, deps=[d])
        if BLOCKS:
            acc += d * _factor(low, high, step - start, lines, C, HALVES)
            if U == 2:
                acc += e * _factor(low, high, step - start + 1, lines, C, HALVES)
        else:
            acc += d
            if U == 2:
                acc += e
    if OVERLAP and not EARLY:
        gdc_launch_dependents()
    m = gl.arange(0, BM, gl.SliceLayout(0, C))
    acc, finish = _sum_of_spans(acc, parts, arrived, lines, m, BN, BM, SPLITS)
    if ACT != "":
        _store_activated(acc, y, made_scales, first, held, rows, ACT, BM, WARPS)
    elif finish:
        _store(acc, x_scales, w_scales, bias, y, first, held, rows, BIAS, BM, BN, BLOCKS, FIXED)
