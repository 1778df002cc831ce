"""Attention of one query for each request, for devices with products of warp groups and copies of whole tiles (Hopper):
all programs read the same number of tiles of keys.

The tiles of all requests and key heads lie in one row, which is cut into equal parts, one for each program (Osama et
al. 2023, "stream-K"). A key head of a request with few tiles counts as some more: it takes longer than they do. One
warp copies tiles of keys and values, page by page, into a ring of shared memory, and runs ahead over the borders of
requests; one group of four warps computes. The query heads that share a key head are the first lines of a product of
64. What several programs have a part of is merged by the last of them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from evener_kernels_triton.jit.launch import fast_launch
from evener_kernels_triton.jit.prefill_attention import LINE, RENAMED, _add, _copy_in, _sync

#: Lines of a product of a warp group.
LINES = gl.constexpr(64)
#: Page numbers that are read at once.
PAGES = gl.constexpr(128)


@gluon.jit
def _tiles(length, WINDOW: gl.constexpr, N: gl.constexpr):
    """Of requests: the first position that their query sees, the tile of keys with it, and how many tiles there are."""
    first = length * 0
    if WINDOW > 0:
        first = gl.maximum(length - WINDOW, 0)
    return first, first // N, (length + N - 1) // N - first // N


@gluon.jit
def _places(tiles, LEAST: gl.constexpr):
    """In the row, of a key head with so many tiles: one for each, after those without a tile that make LEAST."""
    return gl.where(tiles > 0, gl.maximum(tiles, LEAST), 0)


@gluon.jit
def _count(kv_lens, requests, WINDOW: gl.constexpr, N: gl.constexpr, LEAST: gl.constexpr):
    """Places of a key head of all requests."""
    LANES: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    total = 0
    for base in range(0, requests, 128):
        index = base + gl.arange(0, 128, LANES)
        _, _, tiles = _tiles(gl.load(kv_lens + index, mask=index < requests, other=0), WINDOW, N)
        total += gl.sum(_places(tiles, LEAST), 0)
    return total


@gluon.jit
def _begin(program, share, extra):
    """The first place of a program."""
    return program * share + gl.minimum(program, extra)


@gluon.jit
def _program(place, share, extra):
    """The program that has a place."""
    larger = extra * (share + 1)
    return gl.where(place < larger, place // (share + 1), extra + (place - larger) // gl.maximum(share, 1))


@gluon.jit
def _find(
    number, stop, kv_lens, requests, KV_HEADS: gl.constexpr, WINDOW: gl.constexpr, N: gl.constexpr, LEAST: gl.constexpr,
):  # fmt: skip
    """Of the key head with place ``number``: its request and its number there, the place of its first tile, the tokens
    of its state, the first position that the query sees, its tiles, the first of them from ``number`` on, how many
    there are before ``stop``, and the place after them.

    Each warp reads the lengths of all requests at once: one wait for memory and none for other warps."""
    LANES: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    row = 0
    seen = 0
    start = 0
    length = 0
    for base in range(0, requests, 128):
        index = base + gl.arange(0, 128, LANES)
        lengths = gl.load(kv_lens + index, mask=index < requests, other=0)
        _, _, tiles = _tiles(lengths, WINDOW, N)
        ends = seen + gl.associative_scan(_places(tiles, LEAST) * KV_HEADS, 0, _add)
        seen = gl.max(ends, 0)
        before = (index < requests) & (ends <= number)
        row += gl.sum(before.to(gl.int32), 0)
        start = gl.maximum(start, gl.max(gl.where(before, ends, 0), 0))
        length += gl.sum(gl.where(index == row, lengths, 0), 0)
    first, front, tiles = _tiles(length, WINDOW, N)
    places = gl.maximum(tiles, LEAST)
    head = (number - start) // places
    start += head * places + places - tiles  # of its first tile
    tile = gl.maximum(number - start, 0)
    end = gl.minimum(start + tiles, stop)
    count = gl.maximum(end - start, 0) - tile
    return row, head, start, length, first, tiles, front + tile, count, end


@gluon.jit
def _pages(row_table, base, length, PAGE: gl.constexpr, LANES: gl.constexpr):
    """PAGES numbers of a request's pages, from ``base`` on."""
    at = base + gl.arange(0, PAGES, LANES)
    return gl.load(row_table + at, mask=at * PAGE < length, other=0)


@gluon.jit
def _copy_tile(
    desc, tile, barrier, chunks, slot, pages, base, head, first, length, page_lines, lines,
    PAGE: gl.constexpr, D: gl.constexpr, N: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    """One tile of N keys or values, in boxes of a page's tokens and LINE numbers. ``pages``: PAGES numbers of pages
    from ``base`` on. Boxes that the query does not see are not read: zeros come in their place."""
    BOX: gl.constexpr = min(PAGE, N)
    at_page = gl.arange(0, PAGES, LANES)
    mbarrier.expect(barrier, N * D * 2)
    for box in gl.static_range(N // BOX):
        at = tile * N + box * BOX
        seen = (at < length) & (at + BOX > first)
        page = gl.sum(gl.where(at_page == at // PAGE - base, pages, 0), 0)
        line = gl.where(seen, page * page_lines + head * PAGE + at % PAGE, lines)
        for part in gl.static_range(D // LINE):
            _copy_in(desc, [line, part * LINE], barrier, chunks.index((slot * (D // LINE) + part) * (N // BOX) + box))


@gluon.jit
def _produce(
    k_desc, v_desc, k_chunks, v_chunks, k_full, k_empty, v_full, v_empty, table, kv_lens, table_row, requests, k_lines,
    v_lines, k_all, v_all, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, WINDOW: gl.constexpr, D: gl.constexpr,
    N: gl.constexpr, STAGES: gl.constexpr, LEAST: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Copies what this program reads."""
    if OVERLAP:
        # All programs run by then, so that dependents take no place of theirs. They ask for weights meanwhile.
        gdc_launch_dependents()
    LANES: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    total = _count(kv_lens, requests, WINDOW, N, LEAST) * KV_HEADS
    share = total // gl.num_programs(0)
    extra = total % gl.num_programs(0)
    program = gl.program_id(0)
    number = _begin(program, share, extra)
    stop = _begin(program + 1, share, extra)
    done = 0
    while number < stop:
        row, head, _, length, first, _, tile, count, end = _find(
            number, stop, kv_lens, requests, KV_HEADS, WINDOW, N, LEAST
        )
        row_table = table + row.to(gl.int64) * table_row
        base = tile * N // PAGE
        pages = _pages(row_table, base, length, PAGE, LANES)
        for j in range(0, count):
            if (tile + j + 1) * N > (base + PAGES) * PAGE:
                base = (tile + j) * N // PAGE
                pages = _pages(row_table, base, length, PAGE, LANES)
            if OVERLAP:
                # All but the newest token, and the tables, were there before the step began.
                newest = (tile + j + 1) * N >= length
                if newest:
                    gdc_wait()
            slot = (done + j) % STAGES
            phase = (((done + j) // STAGES) & 1) ^ 1
            mbarrier.wait(k_empty.index(slot), phase)
            _copy_tile(
                k_desc, tile + j, k_full.index(slot), k_chunks, slot, pages, base, head, first, length, k_lines, k_all,
                PAGE, D, N, LANES,
            )  # fmt: skip
            mbarrier.wait(v_empty.index(slot), phase)
            _copy_tile(
                v_desc, tile + j, v_full.index(slot), v_chunks, slot, pages, base, head, first, length, v_lines, v_all,
                PAGE, D, N, LANES,
            )  # fmt: skip
        done += count
        number = end


@gluon.jit
def _attend(
    q, k_tiles, v_tiles, v_chunks, k_full, k_empty, v_full, v_empty, done, tile, count, first, length, scale,
    PAGE: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Product, running maximum (scaled) and sum of ``count`` tiles of keys of one key head from ``tile`` on. ``done``:
    tiles before them in the ring."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    BOX: gl.constexpr = min(PAGE, N)
    columns = gl.arange(0, N, gl.SliceLayout(0, S_LAYOUT))
    m = gl.full([LINES], -1e30, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    mass = gl.full([LINES], 0.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    o = gl.full([LINES, D], 0.0, gl.float32, O_LAYOUT)
    left = length % PAGE
    for j in range(0, count):
        slot = (done + j) % STAGES
        phase = ((done + j) // STAGES) & 1
        mbarrier.wait(k_full.index(slot), phase)
        zero = gl.full([LINES, N], 0.0, gl.float32, S_LAYOUT)
        s_token = warpgroup_mma(q, k_tiles.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s_token,))
        mbarrier.arrive(k_empty.index(slot))
        key = (tile + j) * N + columns
        s = gl.where(((key < length) & (key >= first))[None, :], s, float("-inf"))
        new = gl.maximum(m, gl.max(s, 1) * scale)
        alpha = gl.exp2(m - new)
        p = gl.exp2(s * scale - new[:, None])
        mass = mass * alpha + gl.sum(p, 1)
        m = new
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        weights = gl.convert_layout(p.to(q.dtype), P_LAYOUT)
        mbarrier.wait(v_full.index(slot), phase)
        if ((tile + j + 1) * N > length) & (left > 0):
            # What follows the last token in its page was never written and may be no number; a weight of 0 does
            # not help.
            FIX: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
            box = (length - (tile + j) * N) // BOX
            keep = (gl.arange(0, BOX, gl.SliceLayout(1, FIX)) < length - (tile + j) * N - box * BOX)[:, None]
            for part in gl.static_range(D // LINE):
                chunk = v_chunks.index((slot * (D // LINE) + part) * (N // BOX) + box)
                value = chunk.load(FIX)
                chunk.store(gl.where(keep, value, 0.0))
            fence_async_shared()
            _sync()
        o_token = warpgroup_mma(weights, v_tiles.index(slot), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o_token,))
        mbarrier.arrive(v_empty.index(slot))
    return o, m, mass


@gluon.jit
def _consume(
    query, out, parts, stats, arrived, q_smem, k_tiles, v_tiles, v_chunks, k_full, k_empty, v_full, v_empty, kv_lens,
    requests, q_row, q_head, scale, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr,
    WINDOW: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, LEAST: gl.constexpr,
    MERGED: gl.constexpr, HIGH: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    GROUP: gl.constexpr = HEADS // KV_HEADS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q_smem.dtype
    total = _count(kv_lens, requests, WINDOW, N, LEAST) * KV_HEADS
    share = total // gl.num_programs(0)
    extra = total % gl.num_programs(0)
    program = gl.program_id(0)
    number = _begin(program, share, extra)
    stop = _begin(program + 1, share, extra)
    done = 0
    q_lines = gl.arange(0, LINES, gl.SliceLayout(1, Q_LAYOUT))
    q_d = gl.arange(0, D, gl.SliceLayout(0, Q_LAYOUT))
    s_lines = gl.arange(0, LINES, gl.SliceLayout(1, S_LAYOUT))
    o_lines = gl.arange(0, LINES, gl.SliceLayout(1, O_LAYOUT))
    o_d = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
    if OVERLAP:
        # Programs without work leave at once.
        busy = number < stop
        if busy:
            gdc_wait()
    while number < stop:
        row, head, start, length, first, tiles, tile, count, end = _find(
            number, stop, kv_lens, requests, KV_HEADS, WINDOW, N, LEAST
        )
        if count > 0:
            at = query + row.to(gl.int64) * q_row + (head * GROUP + q_lines)[:, None] * q_head + q_d[None, :]
            _sync()  # no warp reads the queries before
            q_smem.store(gl.load(at, mask=(q_lines < GROUP)[:, None], other=0.0))
            fence_async_shared()
            _sync()
            o, m, mass = _attend(
                q_smem, k_tiles, v_tiles, v_chunks, k_full, k_empty, v_full, v_empty, done, tile, count, first, length,
                scale, PAGE, D, N, STAGES, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
            line = row.to(gl.int64) * HEADS + head * GROUP
            if count == tiles:
                o_share = gl.convert_layout(1.0 / mass, gl.SliceLayout(1, O_LAYOUT))
                gl.store(
                    out + (line + o_lines)[:, None] * D + o_d[None, :], (o * o_share[:, None]).to(dtype),
                    mask=(o_lines < GROUP)[:, None],
                )  # fmt: skip
            else:
                # A program may have the end of a head first, and the beginning of one last.
                place = program * 2 + gl.where(number > start, 0, 1)
                cell = place * GROUP
                gl.store(parts + (cell + o_lines)[:, None] * D + o_d[None, :], o, mask=(o_lines < GROUP)[:, None])
                gl.store(stats + (cell + s_lines) * 2, m, mask=s_lines < GROUP)
                gl.store(stats + (cell + s_lines) * 2 + 1, mass, mask=s_lines < GROUP)
                low = _program(start, share, extra)
                high = _program(start + tiles - 1, share, extra)
                _sync()
                counter = arrived + row * KV_HEADS + head
                before = gl.atomic_add(counter, 1, sem="acq_rel")
                if before == high - low:
                    gl.store(counter, 0)
                    _merge(out, parts, stats, low, high, start, line, share, extra, GROUP, D, MERGED, HIGH, dtype)
        done += count
        number = end


@gluon.jit
def _merge(
    out, parts, stats, low, high, first, line, share, extra, GROUP: gl.constexpr, D: gl.constexpr, MERGED: gl.constexpr,
    HIGH: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The result of a request's key head, of which programs ``low`` to ``high`` have parts, MERGED at a time; its first
    tile is at place ``first``. Loads bypass the L1 cache to see the stores of other programs."""
    WIDE: gl.constexpr = 4
    ACROSS: gl.constexpr = min(32, D // WIDE)
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [MERGED, 1, WIDE], [1, 32 // ACROSS, ACROSS], [1, min(4, HIGH), 4 // min(4, HIGH)], [2, 1, 0]
    )
    ROWS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    SUMS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    member = gl.arange(0, MERGED, gl.SliceLayout(1, ROWS))
    rows = gl.arange(0, HIGH, gl.SliceLayout(0, ROWS))
    d = gl.arange(0, D, gl.SliceLayout(0, SUMS))
    best = gl.full([HIGH], -1e30, gl.float32, gl.SliceLayout(0, ROWS))
    mass = gl.full([HIGH], 0.0, gl.float32, gl.SliceLayout(0, ROWS))
    acc = gl.full([HIGH, D], 0.0, gl.float32, SUMS)
    for base in range(low, high + 1, MERGED):
        program = base + member
        place = program * 2 + gl.where(_begin(program, share, extra) > first, 0, 1)
        cell = (place * GROUP)[:, None] + rows[None, :]
        live = (program <= high)[:, None] & (rows < GROUP)[None, :]
        m = gl.load(stats + cell * 2, mask=live, other=-1e30, cache_modifier=".cg")
        sums = gl.load(stats + cell * 2 + 1, mask=live, other=0.0, cache_modifier=".cg")
        values = gl.load(
            parts + gl.expand_dims(cell, 2) * D + gl.expand_dims(gl.expand_dims(d, 0), 0),
            mask=gl.expand_dims(live, 2), other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new = gl.maximum(best, gl.max(m, 0))
        old = gl.exp2(best - new)
        weight = gl.exp2(m - new[None, :])
        mass = mass * old + gl.sum(weight * sums, 0)
        acc = acc * _column(old, SUMS) + gl.sum(gl.expand_dims(weight, 2) * values, 0)
        best = new
    at = gl.arange(0, HIGH, gl.SliceLayout(1, SUMS))
    result = acc / _column(gl.where(mass > 0, mass, 1.0), SUMS)
    gl.store(out + (line + at)[:, None] * D + d[None, :], result.to(dtype), mask=(at < GROUP)[:, None])


@gluon.jit
def _column(x, LAYOUT: gl.constexpr):
    return gl.convert_layout(x, gl.SliceLayout(1, LAYOUT))[:, None]


@fast_launch
@gluon.jit(do_not_specialize=["requests"])
def even_kernel(
    query, k_desc, v_desc, out, parts, stats, arrived, table, kv_lens, table_row, requests, k_lines, v_lines, k_all,
    v_all, q_row, q_head, scale, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr,
    WINDOW: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, LEAST: gl.constexpr,
    MERGED: gl.constexpr, HIGH: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """As many programs as run side by side.

    Args:
        query: [requests, HEADS, D]; out: the same, contiguous.
        k_desc, v_desc: lines of the pool, each D numbers, in boxes [min(PAGE, N), LINE].
        parts, stats: float32 [programs, 2, HEADS / KV_HEADS, D] and [..., 2].
        arrived: int32 [requests, KV_HEADS], 0 before and after.
        k_lines, v_lines: from page to page; k_all, v_all: lines of the pool.
        LEAST: tiles that a key head of a request counts as, at least.
        MERGED: parts that are merged at a time; HIGH: a power of two, at least HEADS / KV_HEADS.
    """
    BOX: gl.constexpr = min(PAGE, N)
    dtype: gl.constexpr = k_desc.dtype
    KV: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [LINES, D], KV)
    COUNT: gl.constexpr = STAGES * (D // LINE) * (N // BOX)
    k_chunks = gl.allocate_shared_memory(dtype, [COUNT, BOX, LINE], KV)
    v_chunks = gl.allocate_shared_memory(dtype, [COUNT, BOX, LINE], KV)
    if RENAMED:
        k_tiles = k_chunks.reinterpret(dtype, [STAGES, N, D], KV)
        v_tiles = v_chunks.reinterpret(dtype, [STAGES, N, D], KV)
    else:
        k_tiles = k_chunks._reinterpret(dtype, [STAGES, N, D], KV)
        v_tiles = v_chunks._reinterpret(dtype, [STAGES, N, D], KV)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                query, out, parts, stats, arrived, q_smem, k_tiles, v_tiles, v_chunks, k_full, k_empty, v_full, v_empty,
                kv_lens, requests, q_row, q_head, scale, HEADS, KV_HEADS, PAGE, WINDOW, D, N, STAGES, LEAST, MERGED,
                HIGH, OVERLAP,
            )),
            (_produce, (
                k_desc, v_desc, k_chunks, v_chunks, k_full, k_empty, v_full, v_empty, table, kv_lens, table_row,
                requests, k_lines, v_lines, k_all, v_all, KV_HEADS, PAGE, WINDOW, D, N, STAGES, LEAST, OVERLAP,
            )),
        ],
        [1],
        [64],  # registers a thread; the program's own group gets what is left of ``maxnreg``
    )  # fmt: skip
