"""Products of one token with weights in float8_e4m3fn, for devices whose products of warp groups take such numbers from
shared memory (Hopper): no weight passes through a register.

The lines of a product are 16 rows of the weight in each of several spans of 128 columns. Its columns are x in the same
spans, twice: a number of x is the sum of two e4m3, the second of which is multiplied by 1/32. So two columns are of use
to a line, and the others are not looked at. Together the two have the eight bits of a bfloat16; what is lost of numbers
that are far smaller than the largest is less than 2^-23 of that. Sums of 128 columns are added in float32: the matrix
unit keeps fewer bits.

Weights are copied asynchronously into a ring of shared memory, and the ring is filled before the launch waits for x.
"""

# ruff: noqa: RUF005 - the compiler of these kernels does not know starred expressions

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from evener_kernels_triton.jit.launch import fast_launch

# A name that changed between versions of the compiler.
_begin_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

#: Columns of a span, and rows of a tile.
SPAN, ROWS = gl.constexpr(128), gl.constexpr(16)
#: What the second part of x is multiplied by.
FINE = gl.constexpr(32.0)


@gluon.jit
def _rows(tile, rows, r, HALVES: gl.constexpr):
    """The rows of the weight that lines ``r`` of a tile are, and whether these are inside. HALVES 2: eight rows, then
    those that are ``rows`` after them."""
    if HALVES == 2:
        n = tile * (ROWS // 2) + r % (ROWS // 2)
        inside = n < rows
        n += r // (ROWS // 2) * rows
    else:
        n = tile * ROWS + r
        inside = n < rows
    return n, inside


@gluon.jit
def _copy(
    ring, w, tile, rows, columns, step, place, HALVES: gl.constexpr, SPANS: gl.constexpr, U: gl.constexpr,
    EVEN: gl.constexpr,
):  # fmt: skip
    """Begin to copy U steps of a tile into a place of the ring."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [SPANS, 1], [1, 0])
    m = gl.arange(0, ROWS * SPANS, gl.SliceLayout(1, LANES))
    n, inside = _rows(tile, rows, m % ROWS, HALVES)
    line = w + n.to(gl.int64)[:, None] * columns
    for u in gl.static_range(U):
        first = ((step + u) * SPANS + m // ROWS) * SPAN
        c = first[:, None] + gl.arange(0, SPAN, gl.SliceLayout(0, LANES))[None, :]
        mask = inside[:, None] if EVEN else inside[:, None] & (c < columns)
        _begin_copy(ring.index(place * U + u), line + c, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _scales(
    scales, tile, rows, blocks, step, HALVES: gl.constexpr, LINES: gl.constexpr, SPANS: gl.constexpr,
    HIGH: gl.constexpr, WIDE: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Scales of the lines of a step."""
    m = gl.arange(0, ROWS * SPANS, LINES)
    n, inside = _rows(tile, rows, m % ROWS, HALVES)
    block = (step * SPANS + m // ROWS) * SPAN // WIDE
    return gl.load(scales + n // HIGH * blocks + block, mask=inside if EVEN else inside & (block < blocks), other=0.0)


@gluon.jit
def _activate(x, ACT: gl.constexpr):
    """As ``jit.rows.activate``."""
    if ACT == "gelu":
        y = 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    else:
        inner = x if ACT == "silu" else 1.5957691216057308 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + gl.exp(-inner))
    return y


@gluon.jit
def _gains(gain, near, columns, NORM: gl.constexpr, T: gl.constexpr, SPANS: gl.constexpr):
    """A norm's factors, which do not depend on the launch before."""
    gains = ()
    if NORM:
        for t in gl.static_range(T):
            c = t * (SPANS * SPAN) + near
            gains = gains + (gl.load(gain + c, mask=c < columns, other=0.0),)
    return gains


@gluon.jit
def _split_x(
    x, residual, total, gains, parts, near, columns, eps, offset, ADD: gl.constexpr, NORM: gl.constexpr,
    T: gl.constexpr, SPANS: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """x in two parts of e4m3, each times a power of two, into ``parts``; what sums are multiplied by."""
    loaded = ()
    added = ()
    for t in gl.static_range(T):
        c = t * (SPANS * SPAN) + near
        loaded = loaded + (gl.load(x + c, mask=c < columns, other=0.0),)
        if ADD:
            added = added + (gl.load(residual + c, mask=c < columns, other=0.0),)
    squares = gl.zeros([SPANS, SPAN], gl.float32, X)
    most = gl.zeros([SPANS, SPAN], gl.float32, X)
    values = ()
    for t in gl.static_range(T):
        v = loaded[t].to(gl.float32)
        if ADD:
            v += added[t].to(gl.float32)
            if gl.program_id(0) == 0:
                c = t * (SPANS * SPAN) + near
                gl.store(total + c, v.to(total.dtype.element_ty), mask=c < columns)
        if NORM:
            squares += v * v
            v = v * (gains[t].to(gl.float32) + offset)
        most = gl.maximum(most, gl.abs(v))
        if ADD or NORM:
            values = values + (v,)
    # The largest is between 128 and 256 afterwards. NaN stays NaN.
    high = gl.maximum(gl.cast(gl.max(gl.max(most, 1), 0), gl.int32, bitcast=True) >> 23, 15)
    lift = gl.cast((261 - high) << 23, gl.float32, bitcast=True)
    back = gl.cast(gl.where(high == 255, 0x7FC00000, (high - 7) << 23), gl.float32, bitcast=True)
    for t in gl.static_range(T):
        if ADD or NORM:
            v = values[t] * lift
        else:
            # Once more, from the nearest cache: of long rows, registers do not hold all.
            c = t * (SPANS * SPAN) + near
            v = gl.load(x + c, mask=c < columns, other=0.0).to(gl.float32) * lift
        first = v.to(gl.float8e4nv)
        second = ((v - first.to(gl.float32)) * FINE).to(gl.float8e4nv)
        both = gl.permute(gl.join(first, second), (0, 2, 1))
        parts.index(t).store(gl.reshape(both, [2 * SPANS, SPAN]))
    fence_async_shared()
    if NORM:
        back = back * gl.rsqrt(gl.sum(gl.sum(squares, 1), 0) / columns + eps)
    return back


@gluon.jit
def _finish(
    sums, back, scales, bias, y, tile, rows, BIAS: gl.constexpr, ACT: gl.constexpr, SPANS: gl.constexpr,
    HIGH: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Store a tile's results from its sums."""
    HALVES: gl.constexpr = 2 if ACT != "" else 1
    SIZE: gl.constexpr = ROWS // HALVES
    RESULT: gl.constexpr = gl.BlockedLayout([1], [32], [SPANS], [0])
    sums = gl.convert_layout(sums, RESULT) * back
    n, inside = _rows(tile, rows, gl.arange(0, ROWS, RESULT), HALVES)
    if WIDE == 0:
        sums *= gl.load(scales + n // HIGH, mask=inside, other=0.0)
    if BIAS:
        sums += gl.load(bias + n, mask=inside, other=0.0).to(gl.float32)
    if HALVES == 2:
        PAIRS: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [SPANS, 1], [1, 0])
        gate, up = gl.split(gl.convert_layout(gl.permute(gl.reshape(sums, [2, SIZE]), (1, 0)), PAIRS))
        n = tile * SIZE + gl.arange(0, SIZE, gl.SliceLayout(1, PAIRS))
        gl.store(y + n, (_activate(gate, ACT) * up).to(y.dtype.element_ty), mask=n < rows)
    else:
        gl.store(y + n, sums.to(y.dtype.element_ty), mask=inside)


@gluon.jit
def _product(ring, parts, place, now, u, M: gl.constexpr, SPANS: gl.constexpr, C: gl.constexpr):
    """Begin the product of a step of a place of the ring."""
    none = gl.zeros([M, 2 * SPANS], gl.float32, C)
    return warpgroup_mma(
        ring.index(place + u), parts.index(now + u).permute((1, 0)), none, use_acc=False, is_async=True
    )


@fast_launch
@gluon.jit
def stored_token_kernel(
    x, residual, total, gain, w, scales, bias, y, rows, columns, blocks, eps, offset,
    ADD: gl.constexpr, NORM: gl.constexpr, BIAS: gl.constexpr, ACT: gl.constexpr, SPANS: gl.constexpr, T: gl.constexpr,
    U: gl.constexpr, PLACES: gl.constexpr, EVEN: gl.constexpr, OVERLAP: gl.constexpr, HIGH: gl.constexpr,
    WIDE: gl.constexpr,
):  # fmt: skip
    """y = w @ x; ADD, NORM, ACT, HIGH and WIDE as in ``jit.linear.persistent_gemv_kernel``.

    A tile has 16 rows of w and T steps of SPANS spans, U of which are a place of the ring. A program loops over tiles.
    A norm's factor is multiplied with the sums.
    """
    if OVERLAP:
        gdc_launch_dependents()
    M: gl.constexpr = ROWS * SPANS
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [SPANS, 1], [16, 2 * SPANS, 32])
    LINES: gl.constexpr = gl.SliceLayout(1, C)
    X: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [SPANS, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    HALVES: gl.constexpr = 2 if ACT != "" else 1
    SIZE: gl.constexpr = ROWS // HALVES
    AHEAD: gl.constexpr = 4 if T % 4 == 0 else T  # steps from the load of a scale to its use
    parts = gl.allocate_shared_memory(gl.float8e4nv, [T, 2 * SPANS, SPAN], SHARED)
    ring = gl.allocate_shared_memory(gl.float8e4nv, [PLACES * U, M, SPAN], SHARED)
    tile = gl.program_id(0)
    jump = gl.num_programs(0)
    # The step whose copy comes next.
    coming = tile
    at = 0
    for place in gl.static_range(PLACES - 1):
        _copy(ring, w, coming, rows, columns, at, place, HALVES, SPANS, U, EVEN)
        at += U
        coming = gl.where(at == T, coming + jump, coming)
        at = gl.where(at == T, 0, at)
    s = ()
    if WIDE > 0:
        for step in gl.static_range(AHEAD):
            s = s + (_scales(scales, tile, rows, blocks, step, HALVES, LINES, SPANS, HIGH, WIDE, EVEN),)
    span = gl.arange(0, SPANS, gl.SliceLayout(1, X)) * SPAN
    near = span[:, None] + gl.arange(0, SPAN, gl.SliceLayout(0, X))[None, :]
    gains = _gains(gain, near, columns, NORM, T, SPANS)
    if OVERLAP:
        gdc_wait()
    back = _split_x(x, residual, total, gains, parts, near, columns, eps, offset, ADD, NORM, T, SPANS, X)
    column = gl.arange(0, 2 * SPANS, gl.SliceLayout(0, C))[None, :]
    own = (gl.arange(0, M, LINES) // ROWS)[:, None] == column // 2
    factor = gl.where(column % 2 == 1, 1.0 / FINE, 1.0)
    place = 0
    free = PLACES - 1
    while tile * SIZE < rows:
        acc = gl.zeros([M, 2 * SPANS], gl.float32, C)
        for base in range(0, T, AHEAD):
            for near_step in gl.static_range(0, AHEAD, U):
                async_copy.wait_group(PLACES - 2)
                fence_async_shared()
                now = base + near_step
                d = _product(ring, parts, place * U, now, 0, M, SPANS, C)
                e = d
                if U == 2:
                    e = _product(ring, parts, place * U, now, 1, M, SPANS, C)
                _copy(ring, w, coming, rows, columns, at, free, HALVES, SPANS, U, EVEN)
                at += U
                coming = gl.where(at == T, coming + jump, coming)
                at = gl.where(at == T, 0, at)
                place = gl.where(place == PLACES - 1, 0, place + 1)
                free = gl.where(free == PLACES - 1, 0, free + 1)
                if U == 2:
                    d, e = warpgroup_mma_wait(0, deps=[d, e])
                else:
                    d = warpgroup_mma_wait(0, deps=[d])
                if WIDE > 0:
                    acc += d * s[0][:, None]
                    if U == 2:
                        acc += e * s[1][:, None]
                    to = gl.where(base + AHEAD < T, tile, tile + jump)
                    later = gl.where(base + AHEAD < T, base + AHEAD, 0) + near_step
                    for u in gl.static_range(U):
                        s = s[1:] + (
                            _scales(scales, to, rows, blocks, later + u, HALVES, LINES, SPANS, HIGH, WIDE, EVEN),
                        )
                else:
                    acc += d
                    if U == 2:
                        acc += e
        # What lines made of other spans' x may be no number, so it is not multiplied by zero.
        sums = gl.sum(gl.reshape(gl.sum(gl.where(own, acc * factor, 0.0), 1), [SPANS, ROWS]), 0)
        _finish(sums, back, scales, bias, y, tile, rows, BIAS, ACT, SPANS, HIGH, WIDE)
        tile += jump
