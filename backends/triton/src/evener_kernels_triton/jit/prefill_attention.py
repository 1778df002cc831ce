"""Attention of long queries over pages, for devices with products of warp groups and copies of whole tiles (Hopper).

A program works on one piece after another: a tile of query tokens of one head. One warp takes pieces off a counter and
copies tiles of keys and values, page by page, into a ring of shared memory, those of the next piece while the last one
is being finished; two groups of four warps each have half of the queries. While one group takes the softmax of a tile,
the other's products run, and within a group the products with the next keys run beside those with the last values (Shah
et al. 2024). Tiles of keys are read from the last to the first: those that need a mask for causality come first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from evener_kernels_triton.jit.launch import fast_launch

# Names that changed between versions of the compiler.
_copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_sync = getattr(gl, "barrier", None) or gl.thread_barrier
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

#: Elements of a line of shared memory that the copies of 16-bit types write: 128 bytes.
LINE = gl.constexpr(64)


@gluon.jit
def _copy_tile(
    desc, tile, barrier, chunks, slot, row_table, head, first, length, page_lines, lines,
    PAGE: gl.constexpr, D: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """One tile of N keys or values, in boxes of a page's tokens and LINE numbers. Pages that no query of this piece
    sees are not read: zeros come in their place."""
    BOX: gl.constexpr = min(PAGE, N)
    mbarrier.expect(barrier, N * D * 2)
    for box in gl.static_range(N // BOX):
        at = tile * N + box * BOX
        seen = (at < length) & (at + BOX > first)
        page = gl.load(row_table + at // PAGE, mask=seen, other=0)
        line = gl.where(seen, page * page_lines + head * PAGE + at % PAGE, lines)
        for part in gl.static_range(D // LINE):
            _copy_in(desc, [line, part * LINE], barrier, chunks.index((slot * (D // LINE) + part) * (N // BOX) + box))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _find(number, query_start, kv_lens, requests, M: gl.constexpr):
    """Tile ``number`` of all requests' tiles of M queries: its request, first token, tokens, position of the first, and
    tokens of the request's state. There is no such tile if the request is ``requests``.

    Each warp reads the lengths of all requests at once: one wait for memory and none for other warps.
    """
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    row = 0
    tiles = 0
    first_tile = 0
    begin = 0
    stop = 0
    length = 0
    for base in range(0, requests, 128):
        index = base + gl.arange(0, 128, LANES)
        real = index < requests
        starts = gl.load(query_start + index, mask=real, other=0)
        stops = gl.load(query_start + index + 1, mask=real, other=0)
        lengths = gl.load(kv_lens + index, mask=real, other=0)
        ends = tiles + gl.associative_scan((stops - starts + M - 1) // M, 0, _add)
        tiles = gl.max(ends, 0)
        before = real & (ends <= number)
        row += gl.sum(before.to(gl.int32), 0)
        first_tile = gl.maximum(first_tile, gl.max(gl.where(before, ends, 0), 0))
        begin += gl.sum(gl.where(real & (index == row), starts, 0), 0)
        stop += gl.sum(gl.where(real & (index == row), stops, 0), 0)
        length += gl.sum(gl.where(real & (index == row), lengths, 0), 0)
    q_first = (number - first_tile) * M
    front = length - (stop - begin) + q_first
    return row, begin + q_first, gl.minimum(stop - begin - q_first, M), front, length


@gluon.jit
def _keys(front, tokens, WINDOW: gl.constexpr, N: gl.constexpr):
    """Of a tile of queries from position ``front`` on: the first position that one sees, the last tile of keys, and how
    many there are."""
    first = front * 0
    if WINDOW > 0:
        first = gl.maximum(front - WINDOW + 1, 0)
    last = (front + tokens - 1) // N
    return first, last, last - first // N + 1


@gluon.jit
def _tell(
    piece, all, told, ready, slot, query_start, kv_lens, requests, HEADS: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    """Finds out what ``piece`` is and leaves it to the groups; no request is ``requests``."""
    number = all - 1 - piece
    row, token, tokens, front, length = _find(number // HEADS, query_start, kv_lens, requests, M)
    row = gl.where(number < 0, requests, row)
    ALL: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    at = gl.arange(0, 8, ALL)
    words = gl.where(
        at == 0, row, gl.where(at == 1, token, gl.where(at == 2, tokens, gl.where(at == 3, front, length)))
    )
    told.index(slot).store(gl.where(at == 5, number % HEADS, words))
    mbarrier.arrive(ready.index(slot))
    return number, row, token, tokens, front, length


@gluon.jit
def _word(words, at, n: gl.constexpr):
    return gl.sum(gl.where(at == n, words, 0), 0)


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, q_smem, k_chunks, v_chunks, q_full, q_empty, k_full, k_empty, v_full, v_empty, told, ready,
    taken, table, query_start, kv_lens, table_row, requests, all, k_lines, v_lines, k_all, v_all,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, WINDOW: gl.constexpr, D: gl.constexpr,
    N: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Takes pieces of work, and copies what they need. The next is taken while a piece is under way."""
    done = 0
    turn = 0
    number, row, token, tokens, front, length = _tell(
        gl.program_id(0), all, told, ready, 0, query_start, kv_lens, requests, HEADS, M
    )
    while row < requests:
        head = number % HEADS
        kv_head = head // (HEADS // KV_HEADS)
        first, last, tiles = _keys(front, tokens, WINDOW, N)
        row_table = table + row.to(gl.int64) * table_row
        state = length  # of this piece, while the names above become the next one's
        for j in range(0, tiles + 1):
            if j < tiles:
                slot = (done + j) % STAGES
                mbarrier.wait(k_empty.index(slot), (((done + j) // STAGES) & 1) ^ 1)
                _copy_tile(
                    k_desc, last - j, k_full.index(slot), k_chunks, slot, row_table, kv_head, first, state, k_lines,
                    k_all, PAGE, D, N,
                )  # fmt: skip
            if j == 0:
                for half in gl.static_range(2):
                    mbarrier.wait(q_empty.index(half), (turn & 1) ^ 1)
                    mbarrier.expect(q_full.index(half), M // 2 * D * 2)
                    _copy_in(q_desc, [token + half * (M // 2), head * D], q_full.index(half), q_smem.index(half))
            else:
                slot = (done + j - 1) % STAGES
                mbarrier.wait(v_empty.index(slot), (((done + j - 1) // STAGES) & 1) ^ 1)
                _copy_tile(
                    v_desc, last - j + 1, v_full.index(slot), v_chunks, slot, row_table, kv_head, first, state,
                    v_lines, v_all, PAGE, D, N,
                )  # fmt: skip
            if j == gl.minimum(tiles, 2):
                # Both groups have left the piece before this one, so that nobody reads that place any more.
                more = gl.atomic_add(taken, 1)
                if more == all - 1:
                    gl.store(taken, 0)  # nobody asks again: the next launch finds it as this one did
                number, row, token, tokens, front, length = _tell(
                    gl.num_programs(0) + more, all, told, ready, (turn + 1) & 1, query_start, kv_lens, requests,
                    HEADS, M,
                )  # fmt: skip
        done += tiles
        turn += 1


@gluon.jit
def _softmax(
    s, m, mass, position, at, scale, WINDOW: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Weights of a tile of scores; the running maximum (scaled) and sum after it; the factor of what was before."""
    if MASKED:
        seen = at[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (at[None, :] > position[:, None] - WINDOW)
        s = gl.where(seen, s, float("-inf"))
    new = gl.maximum(m, gl.max(s, 1) * scale)
    alpha = gl.exp2(m - new)
    p = gl.exp2(s * scale - new[:, None])
    return p, new, mass * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _step(
    j, done, q, o, p, m, mass, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, position, columns, last, scale,
    WINDOW: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of tile ``j`` beside the product of tile ``j - 1``."""
    slot = (done + j) % STAGES
    before = (done + j - 1) % STAGES
    mbarrier.wait(k_full.index(slot), ((done + j) // STAGES) & 1)
    zero = gl.full([q.shape[0], N], 0.0, gl.float32, S_LAYOUT)
    s_token = warpgroup_mma(q, k_tiles.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((done + j - 1) // STAGES) & 1)
    o_token = warpgroup_mma(p, v_tiles.index(before), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s_token,))
    mbarrier.arrive(k_empty.index(slot))
    at = (last - j) * N + columns
    weights, m, mass, alpha = _softmax(s, m, mass, position, at, scale, WINDOW, MASKED)
    o = warpgroup_mma_wait(0, deps=(o_token,))
    mbarrier.arrive(v_empty.index(before))
    o = o * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
    p = gl.convert_layout(weights.to(p.dtype), P_LAYOUT)
    return o, p, m, mass


@gluon.jit
def _consume(
    HALF: gl.constexpr, out_desc, out, q_smem, k_tiles, v_tiles, v_chunks, q_full, q_empty, k_full, k_empty, v_full,
    v_empty, told, ready, requests, out_row, scale, PAGE: gl.constexpr, WINDOW: gl.constexpr, D: gl.constexpr,
    N: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    ALL: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    at = gl.arange(0, 8, ALL)
    done = 0
    turn = 0
    mbarrier.wait(ready.index(0), 0)
    words = told.index(0).load(ALL)
    while _word(words, at, 0) < requests:
        tokens = _word(words, at, 2)
        front = _word(words, at, 3)
        _, last, tiles = _keys(front, tokens, WINDOW, N)
        _attend(
            HALF, turn, done, out_desc, out, q_smem.index(HALF), k_tiles, v_tiles, v_chunks, q_full.index(HALF),
            q_empty.index(HALF), k_full, k_empty, v_full, v_empty, _word(words, at, 5), _word(words, at, 1), tokens,
            front, _word(words, at, 4), last, tiles, out_row, scale, PAGE, WINDOW, D, N, M, STAGES,
        )  # fmt: skip
        done += tiles
        turn += 1
        mbarrier.wait(ready.index(turn & 1), (turn // 2) & 1)
        words = told.index(turn & 1).load(ALL)


@gluon.jit
def _attend(
    HALF: gl.constexpr, turn, done, out_desc, out, q, k_tiles, v_tiles, v_chunks, q_full, q_empty, k_full, k_empty,
    v_full, v_empty, head, token, tokens, front, length, last, tiles, out_row, scale, PAGE: gl.constexpr,
    WINDOW: gl.constexpr, D: gl.constexpr, N: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One tile of queries. ``done``: tiles of keys before this one's in the ring."""
    ROWS: gl.constexpr = M // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    BOX: gl.constexpr = min(PAGE, N)
    dtype: gl.constexpr = q.dtype
    # Of the tiles, the first ``masked`` and those from ``whole`` on need a mask.
    masked = gl.minimum(gl.maximum(last - (front + 1) // N + 1, 1), tiles)
    whole = tiles
    if WINDOW > 0:
        whole = gl.minimum(gl.maximum(last - gl.maximum(front + tokens - WINDOW + N - 1, 0) // N + 1, masked), tiles)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    columns = gl.arange(0, N, gl.SliceLayout(0, S_LAYOUT))
    position = front + HALF * ROWS + rows
    m = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    mass = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    o = gl.full([ROWS, D], 0.0, gl.float32, O_LAYOUT)

    slot = done % STAGES
    mbarrier.wait(q_full, turn & 1)
    mbarrier.wait(k_full.index(slot), (done // STAGES) & 1)
    zero = gl.full([ROWS, N], 0.0, gl.float32, S_LAYOUT)
    s_token = warpgroup_mma(q, k_tiles.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s_token,))
    mbarrier.arrive(k_empty.index(slot))
    weights, m, mass, _ = _softmax(s, m, mass, position, last * N + columns, scale, WINDOW, True)
    p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
    left = length % PAGE
    if ((last + 1) * N > length) & (left > 0):
        # What follows the last token in its page was never written and may be no number; a weight of 0 does not help.
        mbarrier.wait(v_full.index(slot), (done // STAGES) & 1)
        FIX: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        box = (length - last * N) // BOX
        keep = (gl.arange(0, BOX, gl.SliceLayout(1, FIX)) < length - last * N - box * BOX)[:, None]
        for part in gl.static_range(D // LINE):
            chunk = v_chunks.index((slot * (D // LINE) + part) * (N // BOX) + box)
            value = chunk.load(FIX)
            chunk.store(gl.where(keep, value, 0.0))
        fence_async_shared()
        _sync()

    for j in range(1, masked):
        o, p, m, mass = _step(
            j, done, q, o, p, m, mass, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, position, columns, last,
            scale, WINDOW, N, D, STAGES, True, S_LAYOUT, O_LAYOUT, P_LAYOUT,
        )  # fmt: skip
    for j in range(masked, whole):
        o, p, m, mass = _step(
            j, done, q, o, p, m, mass, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, position, columns, last,
            scale, WINDOW, N, D, STAGES, False, S_LAYOUT, O_LAYOUT, P_LAYOUT,
        )  # fmt: skip
    if WINDOW > 0:
        for j in range(whole, tiles):
            o, p, m, mass = _step(
                j, done, q, o, p, m, mass, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, position, columns, last,
                scale, WINDOW, N, D, STAGES, True, S_LAYOUT, O_LAYOUT, P_LAYOUT,
            )  # fmt: skip
    slot = (done + tiles - 1) % STAGES
    mbarrier.wait(v_full.index(slot), ((done + tiles - 1) // STAGES) & 1)
    o_token = warpgroup_mma(p, v_tiles.index(slot), o, is_async=True)
    mass = gl.where(mass > 0, mass, 1.0)  # lines that are not real may have seen nothing
    share = gl.convert_layout(1.0 / mass, gl.SliceLayout(1, O_LAYOUT))
    o = warpgroup_mma_wait(0, deps=(o_token,))
    mbarrier.arrive(v_empty.index(slot))
    result = (o * share[:, None]).to(dtype)
    if tokens >= (HALF + 1) * ROWS:
        q.store(result)
        fence_async_shared()
        _sync()
        _copy_out(out_desc, [token + HALF * ROWS, head * D], q)
        tma.store_wait(0)
    else:
        line = HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, O_LAYOUT))
        d = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
        at = out + (token + line).to(gl.int64)[:, None] * out_row + (head * D + d)[None, :]
        gl.store(at, result, mask=(line < tokens)[:, None])
    mbarrier.arrive(q_empty)


@fast_launch
@gluon.jit
def prefill_kernel(
    q_desc, k_desc, v_desc, out_desc, out, taken, table, query_start, kv_lens, table_row, requests, all, k_lines,
    v_lines, k_all, v_all, out_row, scale, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr,
    WINDOW: gl.constexpr, D: gl.constexpr, M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As many programs as run side by side. A piece of work is a tile of queries and a head; the last tiles come first,
    as they see most keys.

    Args:
        q_desc, out_desc: [tokens, heads * D] in boxes [M / 2, D].
        k_desc, v_desc: lines of the pool, each D numbers, in boxes [min(PAGE, N), LINE].
        taken: how many pieces were taken beside the first of each program; 0 before and after.
        all: pieces: tiles of all requests times heads; at least one for each program.
        k_lines, v_lines: from page to page; k_all, v_all: lines of the pool.
    """
    BOX: gl.constexpr = min(PAGE, N)
    dtype: gl.constexpr = q_desc.dtype
    KV: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [2, M // 2, D], KV)
    COUNT: gl.constexpr = STAGES * (D // LINE) * (N // BOX)
    k_chunks = gl.allocate_shared_memory(dtype, [COUNT, BOX, LINE], KV)
    v_chunks = gl.allocate_shared_memory(dtype, [COUNT, BOX, LINE], KV)
    if RENAMED:
        k_tiles = k_chunks.reinterpret(dtype, [STAGES, N, D], KV)
        v_tiles = v_chunks.reinterpret(dtype, [STAGES, N, D], KV)
    else:
        k_tiles = k_chunks._reinterpret(dtype, [STAGES, N, D], KV)
        v_tiles = v_chunks._reinterpret(dtype, [STAGES, N, D], KV)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    told = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                gl.constexpr(0), out_desc, out, q_smem, k_tiles, v_tiles, v_chunks, q_full, q_empty, k_full, k_empty,
                v_full, v_empty, told, ready, requests, out_row, scale, PAGE, WINDOW, D, N, M, STAGES,
            )),
            (_consume, (
                gl.constexpr(1), out_desc, out, q_smem, k_tiles, v_tiles, v_chunks, q_full, q_empty, k_full, k_empty,
                v_full, v_empty, told, ready, requests, out_row, scale, PAGE, WINDOW, D, N, M, STAGES,
            )),
            (_produce, (
                q_desc, k_desc, v_desc, q_smem, k_chunks, v_chunks, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                told, ready, taken, table, query_start, kv_lens, table_row, requests, all, k_lines, v_lines, k_all,
                v_all, HEADS, KV_HEADS, PAGE, WINDOW, D, N, M, STAGES,
            )),
        ],
        [4, 1],
        [232, 40],  # registers a thread; the program's own group gets what is left, 232
    )  # fmt: skip
