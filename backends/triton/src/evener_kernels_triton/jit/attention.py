"""Paged attention: decode with one query token for each request, split over its keys; and any mix of query lengths.

A page of one layer holds ``[kv_heads, PAGE, D]`` keys and ``[kv_heads, PAGE, DV]`` values. The query heads that share a
key head are rows of one matrix product. The softmax runs online in base 2 (Milakov and Gimelshein 2018; Dao et al.
2022); splits are merged by the last program to finish (Dao et al. 2023).

Quantized state (KIND not "") has elements of one byte. The scale of a head's keys is a factor on its scores, that of
its values one on its output.
"""

import triton
import triton.language as tl

from evener_kernels_triton.jit.arrival import is_last_program
from evener_kernels_triton.jit.launch import fast_launch
from evener_kernels_triton.jit.rounded import round_groups
from evener_kernels_triton.jit.stored import widened


@triton.jit
def _tile(
    q, m, mass, acc, at, valid, row_table, keys, values, key_page, value_page, head, scale, cap, slope, position, mask,
    PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, CAP: tl.constexpr,
    SLOPES: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Update the running maximum, sum and product with one tile of keys at positions ``at`` [N]. ``slope`` and
    ``position`` are those of the queries, [M, 1] or one for all."""
    page = tl.load(row_table + at // PAGE, mask=valid, other=0).to(tl.int64)
    line = head * PAGE + at % PAGE
    d = tl.arange(0, DP)
    dv = tl.arange(0, DVP)
    k_at = keys + (page * key_page + line * D)[:, None] + d[None, :]
    v_at = values + (page * value_page + line * DV)[:, None] + dv[None, :]
    k = widened(tl.load(k_at, mask=valid[:, None] & (d < D)[None, :], other=0), KIND, PTX, q.dtype)
    v = widened(tl.load(v_at, mask=valid[:, None] & (dv < DV)[None, :], other=0), KIND, PTX, q.dtype)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if CAP:
        # Scores and cap are both scaled for base 2, so the factor cancels in the argument of tanh.
        s = cap * (2.0 * tl.sigmoid(2.0 * s / cap) - 1.0)
    if SLOPES:
        s -= slope * (position - at[None, :])
    if MASKED:
        s = tl.where(mask, s, float("-inf"))
    new = tl.maximum(m, tl.max(s, 1))
    alpha = tl.exp2(m - new)
    p = tl.exp2(s - new[:, None])
    mass = mass * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return new, mass, acc


@triton.jit
def _first(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """The first position that a query sees."""
    if CHUNKED:
        first = position // WINDOW * WINDOW
    elif WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    else:
        first = position * 0
    return first


@triton.jit
def _slope(slopes, heads, real, SLOPES: tl.constexpr):
    """ALiBi slopes [M, 1]: what each head's score loses per token of distance, in base 2."""
    slope = 0.0
    if SLOPES:
        slope = tl.load(slopes + heads, mask=real, other=0.0)[:, None] * 1.4426950408889634
    return slope


@triton.jit
def _head_scale(scales, head, KIND: tl.constexpr):
    """The scale of a key head's quantized keys or values; 1 if they are not quantized."""
    scale = 1.0
    if KIND != "":
        scale = tl.load(scales + head)
    return scale


@triton.jit
def _span(keys, splits, N: tl.constexpr, MIN_TILES: tl.constexpr):
    """Number of keys in a split: whole tiles, at least MIN_TILES."""
    return tl.maximum(tl.cdiv(tl.cdiv(keys, N), splits), MIN_TILES) * N


@fast_launch
@triton.jit
def decode_kernel(
    query, keys, values, table, kv_lens, sinks, slopes, out, parts, stats, arrived, key_scales, value_scales, scales,
    held, q_row, q_head, table_row, key_page, value_page, scale, cap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr, SLOPES: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, MIN_TILES: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr, EARLY: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr,
    ROUND: tl.constexpr, CAST: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Program (request, tile of the heads of one key head, split). A split has at least MIN_TILES tiles, so short
    requests are not split: the first program then has the result. Otherwise each program stores its sums in ``parts``
    and ``stats``, and the last one merges them. EARLY: all programs run at the same time, and the next launch asks for
    its weights meanwhile. ROUND: what would be stored is rounded to this kind of element, with the scale ``scales`` if
    FIXED, else each head with its own, which is stored in ``scales`` [HEADS, held]."""
    if OVERLAP and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TILES: tl.constexpr = (GROUP + M - 1) // M
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) // TILES
    member = (tl.program_id(1) % TILES) * M + tl.arange(0, M)
    split = tl.program_id(2)
    length = tl.load(kv_lens + row)
    first = _first(length - 1, WINDOW, CHUNKED)
    start = first // N * N
    span = _span(length - start, SPLITS, N, MIN_TILES)
    low = start + split * span
    high = tl.minimum(low + span, length)
    d = tl.arange(0, DP)
    dv = tl.arange(0, DVP)
    heads = head * GROUP + member
    real = member < GROUP
    q = tl.load(
        query + row * q_row + heads[:, None] * q_head + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0
    )
    slope = _slope(slopes, heads, real, SLOPES)
    scale *= _head_scale(key_scales, head, KIND)
    m = tl.full([M], -1e30, tl.float32)
    mass = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DVP], tl.float32)
    for n in range(low, high, N):
        at = n + tl.arange(0, N)
        valid = at < high
        if WINDOW > 0:
            valid = valid & (at >= first)
        m, mass, acc = _tile(
            q, m, mass, acc, at, valid, table + row * table_row, keys, values, key_page, value_page, head, scale, cap,
            slope, length - 1, valid[None, :], PAGE, D, DV, DP, DVP, CAP, SLOPES, True, PRECISION, KIND, PTX,
        )  # fmt: skip
    # Dependents that start earlier would occupy units that this launch still needs.
    if OVERLAP and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    finish = split == 0
    if SPLITS > 1:
        used = tl.cdiv(length - start, span)
        if used > 1:
            finish = low < length
            cell = (row * HEADS + heads) * SPLITS
            if finish:
                tl.store(
                    parts + (cell + split)[:, None] * DV + dv[None, :], acc, mask=real[:, None] & (dv < DV)[None, :]
                )
                tl.store(stats + (cell + split) * 2, m, mask=real)
                tl.store(stats + (cell + split) * 2 + 1, mass, mask=real)
                finish = is_last_program(arrived, tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), used)
            if finish:
                m, mass, acc = _merged(parts, stats, cell, used, real, dv, SPLITS, DV, DVP, M)
    if finish:
        if SINKS:
            sink = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
            new = tl.maximum(m, sink)
            mass = mass * tl.exp2(m - new) + tl.exp2(sink - new)
            acc = acc * tl.exp2(m - new)[:, None]
        acc = acc * _head_scale(value_scales, head, KIND)
        at = (row * HEADS + heads)[:, None] * DV + dv[None, :]
        y = (acc / mass[:, None]).to(query.dtype.element_ty)
        if ROUND != "":
            v = tl.where(real[:, None], y.to(tl.float32), 0.0)  # merged padding is no number
            made, of_head = round_groups(v, scales, ROUND, CAST, FIXED, M)
            if not FIXED:
                tl.store(scales + heads * held + row, of_head, mask=real)
            y = made.to(out.dtype.element_ty, bitcast=True)
        tl.store(out + at, y, mask=real[:, None] & (dv < DV)[None, :])


@triton.jit
def _merged(
    parts, stats, cell, used, real, dv,
    SPLITS: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Merge maximum, sum and product of the splits. Loads bypass the L1 cache to see the stores of other programs."""
    best = tl.full([M], -1e30, tl.float32)
    for s in tl.static_range(SPLITS):
        live = real & (tl.full([M], s, tl.int32) < used)
        best = tl.maximum(best, tl.load(stats + (cell + s) * 2, mask=live, other=-1e30, cache_modifier=".cg"))
    mass = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DVP], tl.float32)
    for s in tl.static_range(SPLITS):
        live = real & (tl.full([M], s, tl.int32) < used)
        weight = tl.exp2(tl.load(stats + (cell + s) * 2, mask=live, other=-1e30, cache_modifier=".cg") - best)
        mass += weight * tl.load(stats + (cell + s) * 2 + 1, mask=live, other=0.0, cache_modifier=".cg")
        acc += weight[:, None] * tl.load(
            parts + (cell + s)[:, None] * DV + dv[None, :], mask=live[:, None] & (dv < DV)[None, :], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
    return best, mass, acc


@fast_launch
@triton.jit
def mixed_kernel(
    query, keys, values, table, query_start, kv_lens, sinks, slopes, out, key_scales, value_scales,
    q_row, q_head, table_row, key_page, value_page, requests, scale, cap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr, SLOPES: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr,
    DVP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Program (tile of queries, key head). Tiles are numbered over all requests: those of request ``r`` start at
    ``query_start[r] // TOKENS + r`` and are at least as many as it needs. So the grid depends on the token count only,
    and no list of tiles is needed.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = M // GROUP
    number = tl.program_id(0)
    head = tl.program_id(1)
    low = 0
    high = requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // TOKENS + middle <= number:
            low = middle
        else:
            high = middle
    row = low
    begin = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - begin
    q_first = (number - (begin // TOKENS + row)) * TOKENS
    if q_first < count:
        length = tl.load(kv_lens + row)
        lines = tl.arange(0, M)
        q_at = q_first + lines // GROUP
        heads = head * GROUP + lines % GROUP
        real = (lines < TOKENS * GROUP) & (q_at < count)
        position = length - count + q_at
        d = tl.arange(0, DP)
        dv = tl.arange(0, DVP)
        token = (begin + q_at).to(tl.int64)
        q = tl.load(
            query + token[:, None] * q_row + heads[:, None] * q_head + d[None, :],
            mask=real[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        front = length - count + q_first
        end = length - count + tl.minimum(q_first + TOKENS, count)
        start = _first(front, WINDOW, CHUNKED) // N * N
        slope = _slope(slopes, heads, real, SLOPES)
        scale *= _head_scale(key_scales, head, KIND)
        m = tl.full([M], -1e30, tl.float32)
        mass = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DVP], tl.float32)
        row_table = table + row.to(tl.int64) * table_row
        # Tiles that are visible to every query of this program need no mask.
        whole = start if WINDOW > 0 else (front + 1) // N * N
        for n in range(start, whole, N):
            at = n + tl.arange(0, N)
            m, mass, acc = _tile(
                q, m, mass, acc, at, at < end, row_table, keys, values, key_page, value_page, head, scale, cap,
                slope, position[:, None], real[:, None], PAGE, D, DV, DP, DVP, CAP, SLOPES, False, PRECISION,
                KIND, PTX,
            )  # fmt: skip
        for n in range(whole, end, N):
            at = n + tl.arange(0, N)
            seen = at[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (at[None, :] >= _first(position, WINDOW, CHUNKED)[:, None])
            m, mass, acc = _tile(
                q, m, mass, acc, at, at < end, row_table, keys, values, key_page, value_page, head, scale, cap,
                slope, position[:, None], seen, PAGE, D, DV, DP, DVP, CAP, SLOPES, True, PRECISION, KIND, PTX,
            )  # fmt: skip
        if SINKS:
            sink = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
            new = tl.maximum(m, sink)
            mass = mass * tl.exp2(m - new) + tl.exp2(sink - new)
            acc = acc * tl.exp2(m - new)[:, None]
        acc = acc * _head_scale(value_scales, head, KIND)
        at = (token * HEADS + heads)[:, None] * DV + dv[None, :]
        mass = tl.where(mass > 0, mass, 1.0)  # padding lines may have seen no key
        tl.store(out + at, (acc / mass[:, None]).to(out.dtype.element_ty), mask=real[:, None] & (dv < DV)[None, :])
