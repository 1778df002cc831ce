"""Paged latent attention (MLA), absorbed: queries in latent space; one row for each token is key and value of every
head.

A page of one layer holds ``[PAGE, RANK + ROPE]``: the normalised latent, then the rotated key. The heads are lines of
one matrix product, which reads each row once for the scores and the values of all heads (DeepSeek-AI 2024).
The softmax runs online in base 2; the parts of one split request are merged by the kernel that leaves latent space.
"""

import triton
import triton.language as tl

from evener_kernels_triton.jit.attention import _span
from evener_kernels_triton.jit.launch import fast_launch


@triton.jit
def _rotate(row, angles, e, inside, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rows at ``row`` [n, 1], rotated, in float32. ``angles`` points at their token's."""
    HALF: tl.constexpr = ROPE // 2
    if INTERLEAVED:
        other = e ^ 1
        angle = e // 2
        sign = tl.where(e % 2 == 0, -1.0, 1.0)
    else:
        other = tl.where(e < HALF, e + HALF, e - HALF)
        angle = e % HALF
        sign = tl.where(e < HALF, -1.0, 1.0)
    x = tl.load(row + e[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(row + other[None, :], mask=inside, other=0.0).to(tl.float32)
    turns = e < ROPE
    cos = tl.load(angles + angle, mask=turns, other=1.0)
    sin = tl.load(angles + HALF + angle, mask=turns, other=0.0) * sign
    return x * cos[None, :] + partner * sin[None, :]


@triton.jit
def _to_latent_space(
    pid, q, w, inside, tokens, q_row, HEADS: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr,
    RANK: tl.constexpr, ROPE: tl.constexpr, NP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Project BM queries of one head into latent space, BN columns of it."""
    TILES: tl.constexpr = (RANK + BN - 1) // BN
    head = (pid // TILES) % HEADS
    t = (pid // (TILES * HEADS)) * BM + tl.arange(0, BM)
    there = t < tokens
    t = t.to(tl.int64)
    n = (pid % TILES) * BN + tl.arange(0, BN)
    k = tl.arange(0, NP)
    # A weight does not depend on the previous kernel, so it is loaded before the wait.
    b = tl.load(
        w + (head * (NOPE + VALUE) + k)[:, None] * RANK + n[None, :],
        mask=(k < NOPE)[:, None] & (n < RANK)[None, :], other=0.0,
    )  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        if LATE:
            tl.extra.cuda.gdc_launch_dependents()
    a = tl.load(
        q + t[:, None] * q_row + head * (NOPE + ROPE) + k[None, :], mask=there[:, None] & (k < NOPE)[None, :], other=0.0
    )
    y = tl.dot(a, b, input_precision=PRECISION)
    to = inside + (t[:, None] * HEADS + head) * (RANK + ROPE) + n[None, :]
    tl.store(to, y.to(inside.dtype.element_ty), mask=there[:, None] & (n < RANK)[None, :])


@triton.jit
def _write_state(
    t, positions, slots, q, latent, gain, cos_sin, rotated, rows, pages, q_row, latent_row, page, eps,
    HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, RP: tl.constexpr,
    EP: tl.constexpr, HP: tl.constexpr, PAGE: tl.constexpr, INTERLEAVED: tl.constexpr, EXPAND: tl.constexpr,
    OVERLAP: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Rotate the rotary part of one token's queries; normalise, rotate and write its state, with EXPAND also to
    ``rows``."""
    # Rotated queries come after those in latent space, or alone.
    WIDE: tl.constexpr = ROPE if EXPAND else RANK + ROPE
    SHIFT: tl.constexpr = 0 if EXPAND else RANK
    d = tl.arange(0, RP)
    e = tl.arange(0, EP)
    g = tl.load(gain + d, mask=d < RANK, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        if LATE:
            tl.extra.cuda.gdc_launch_dependents()
    angles = cos_sin + tl.load(positions + t).to(tl.int64) * ROPE
    slot = tl.load(slots + t).to(tl.int64)
    row = latent + t * latent_row
    x = tl.load(row + d, mask=d < RANK, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps) * g
    to = pages + (slot // PAGE) * page + (slot % PAGE) * (RANK + ROPE)
    # Rounded to the compute dtype first, as by a layer whose state has a narrower dtype.
    x = x.to(latent.dtype.element_ty)
    tl.store(to + d, x.to(pages.dtype.element_ty), mask=d < RANK)
    if EXPAND:
        tl.store(rows + t * (RANK + ROPE) + d, x, mask=d < RANK)
    one = tl.arange(0, 1)[:, None]
    mask = (one == 0) & (e < ROPE)[None, :]
    key = _rotate(row + RANK + one, angles, e, mask, ROPE, INTERLEAVED).to(latent.dtype.element_ty)
    tl.store(to + RANK + e[None, :] + one, key.to(pages.dtype.element_ty), mask=mask)
    if EXPAND:
        tl.store(rows + t * (RANK + ROPE) + RANK + e[None, :] + one, key, mask=mask)
    for first in range(0, HEADS, HP):
        heads = first + tl.arange(0, HP)[:, None]
        real = (heads < HEADS) & (e < ROPE)[None, :]
        rest = _rotate(q + t * q_row + heads * (NOPE + ROPE) + NOPE, angles, e, real, ROPE, INTERLEAVED)
        at = rotated + (t * HEADS + heads) * WIDE + SHIFT + e[None, :]
        tl.store(at, rest.to(rotated.dtype.element_ty), mask=real)


@fast_launch
@triton.jit
def latent_query_kernel(
    positions, slots, q, w, latent, gain, cos_sin, inside, rows, pages,
    tokens, products, q_row, latent_row, page, eps,
    HEADS: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    NP: tl.constexpr, RP: tl.constexpr, EP: tl.constexpr, HP: tl.constexpr, PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EXPAND: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """What follows the projections: the first ``products`` programs project queries into latent space; each other
    program rotates one token and writes its state.

    ``q`` [T, HEADS * (NOPE + ROPE)]; ``w`` [HEADS * (NOPE + VALUE), RANK]; ``latent`` [T, RANK + ROPE]; ``inside`` [T,
    HEADS, RANK + ROPE]. EXPAND: there are no products, ``inside`` is [T, HEADS, ROPE], and ``rows`` [T, RANK + ROPE]
    gets what is written.

    LATE: the next launch may start after this one has waited, so that it can read what all earlier launches wrote.
    """
    if OVERLAP and not LATE:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    if pid < products:
        _to_latent_space(
            pid, q, w, inside, tokens, q_row, HEADS, NOPE, VALUE, RANK, ROPE, NP, BM, BN, PRECISION, OVERLAP, LATE
        )
    else:
        _write_state(
            (pid - products).to(tl.int64), positions, slots, q, latent, gain, cos_sin, inside, rows, pages, q_row,
            latent_row, page, eps, HEADS, NOPE, RANK, ROPE, RP, EP, HP, PAGE, INTERLEAVED, EXPAND, OVERLAP, LATE,
        )  # fmt: skip


@fast_launch
@triton.jit
def latent_write_kernel(
    slots, latent, rope, pages, latent_row, rope_row, page,
    RANK: tl.constexpr, ROPE: tl.constexpr, RP: tl.constexpr, EP: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Write one token for each program into its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    to = pages + (slot // PAGE) * page + (slot % PAGE) * (RANK + ROPE)
    d = tl.arange(0, RP)
    e = tl.arange(0, EP)
    x = tl.load(latent + token * latent_row + d, mask=d < RANK)
    tl.store(to + d, x.to(pages.dtype.element_ty), mask=d < RANK)
    x = tl.load(rope + token * rope_row + e, mask=e < ROPE)
    tl.store(to + RANK + e, x.to(pages.dtype.element_ty), mask=e < ROPE)


@triton.jit
def _pages(row_table, at, valid, PAGE: tl.constexpr):
    """Page numbers of the tokens at positions ``at``; loaded one step before the pages, to hide the latency."""
    return tl.load(row_table + at // PAGE, mask=valid, other=0).to(tl.int64)


@triton.jit
def _state(pages, places, at, valid, page, dtype: tl.constexpr, PAGE: tl.constexpr, RANK: tl.constexpr,
           ROPE: tl.constexpr, RP: tl.constexpr, EP: tl.constexpr):  # fmt: skip
    """Latents [N, RP] and rotated keys [N, EP] of the tokens at positions ``at``, in pages ``places``."""
    line = pages + (places * page + (at % PAGE) * (RANK + ROPE))[:, None]
    d = tl.arange(0, RP)
    e = tl.arange(0, EP)
    c = tl.load(line + d[None, :], mask=valid[:, None] & (d < RANK)[None, :], other=0.0)
    r = tl.load(line + RANK + e[None, :], mask=valid[:, None] & (e < ROPE)[None, :], other=0.0)
    return c.to(dtype), r.to(dtype)


@triton.jit
def _step(qc, qr, c, r, seen, m, mass, acc, scale, PRECISION: tl.constexpr):
    """Update the running maximum, sum and product with the rows ``c`` and ``r``; ``seen``: the mask of each line."""
    s = tl.dot(qc, tl.trans(c), input_precision=PRECISION)
    s = tl.dot(qr, tl.trans(r), s, input_precision=PRECISION) * scale
    s = tl.where(seen, s, float("-inf"))
    new = tl.maximum(m, tl.max(s, 1))
    alpha = tl.exp2(m - new)
    p = tl.exp2(s - new[:, None])
    mass = mass * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None] + tl.dot(p.to(c.dtype), c, input_precision=PRECISION)
    return new, mass, acc


@fast_launch
@triton.jit
def latent_decode_kernel(
    query, pages, table, kv_lens, out, parts, stats,
    q_row, q_head, table_row, page, splits, scale,
    HEADS: tl.constexpr, PAGE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, RP: tl.constexpr,
    EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, MIN_TILES: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (tile of heads, request, split)."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    heads = tl.program_id(0) * M + tl.arange(0, M)
    split = tl.program_id(2)
    length = tl.load(kv_lens + row)
    span = _span(length, splits, N, MIN_TILES)
    low = split * span
    high = tl.minimum(low + span, length)
    d = tl.arange(0, RP)
    e = tl.arange(0, EP)
    real = heads < HEADS
    mask = real[:, None] & (d < RANK)[None, :]
    row_table = table + row * table_row
    dtype: tl.constexpr = query.dtype.element_ty
    start = query + row * q_row + heads[:, None] * q_head
    qc = tl.load(start + d[None, :], mask=mask, other=0.0)
    qr = tl.load(start + RANK + e[None, :], mask=real[:, None] & (e < ROPE)[None, :], other=0.0)
    m = tl.full([M], -1e30, tl.float32)
    mass = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, RP], tl.float32)
    places = _pages(row_table, low + tl.arange(0, N), low + tl.arange(0, N) < high, PAGE)
    for n in range(low, high, N):
        at = n + tl.arange(0, N)
        valid = at < high
        c, r = _state(pages, places, at, valid, page, dtype, PAGE, RANK, ROPE, RP, EP)
        places = _pages(row_table, at + N, at + N < high, PAGE)
        m, mass, acc = _step(qc, qr, c, r, valid[None, :], m, mass, acc, scale, PRECISION)
    # Dependents that start earlier would occupy units that this launch still needs.
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if SPLIT:
        if low < length:
            cell = (row * HEADS + heads) * splits + split
            tl.store(parts + cell[:, None] * RANK + d[None, :], acc, mask=mask)
            tl.store(stats + cell * 2, m, mask=real)
            tl.store(stats + cell * 2 + 1, mass, mask=real)
    else:
        at = ((row * HEADS + heads) * RANK)[:, None] + d[None, :]
        tl.store(out + at, (acc / mass[:, None]).to(out.dtype.element_ty), mask=mask)


@fast_launch
@triton.jit
def latent_one_kernel(
    query, pages, table, kv_lens, parts, stats, q_head, page, splits, scale,
    HEADS: tl.constexpr, PAGE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, RP: tl.constexpr,
    EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, MIN_TILES: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One request: program (tile of heads, split) makes one part. Most programs have one tile, which is in registers,
    as is the one that follows it: a pipeline through shared memory is three times as much code, all of it run once.

    EARLY: the previous launch wrote only the query and the newest token, and let this one start after it had waited
    itself, so the older tokens are loaded before this one waits.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        if not EARLY:
            tl.extra.cuda.gdc_wait()
    heads = tl.program_id(0) * M + tl.arange(0, M)
    split = tl.program_id(1)
    length = tl.load(kv_lens)
    span = _span(length, splits, N, MIN_TILES)
    low = split * span
    high = tl.minimum(low + span, length)
    d = tl.arange(0, RP)
    e = tl.arange(0, EP)
    real = heads < HEADS
    mask = real[:, None] & (d < RANK)[None, :]
    dtype: tl.constexpr = query.dtype.element_ty
    at = low + tl.arange(0, N)
    places = _pages(table, at, at < high, PAGE)
    old = at < high
    if EARLY:
        old = old & (at < length - 1)
    c, r = _state(pages, places, at, old, page, dtype, PAGE, RANK, ROPE, RP, EP)
    coming = at + N
    places_next = _pages(table, coming, coming < high, PAGE)
    if EARLY:
        newest = tl.maximum(length - 1, 0)
        start = pages + tl.load(table + newest // PAGE).to(tl.int64) * page + (newest % PAGE) * (RANK + ROPE)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        # The newest token's row, for the program that has it in its first tile.
        c_new = tl.load(start + d, mask=d < tl.where(newest < low + N, RANK, 0), other=0.0).to(dtype)
        r_new = tl.load(start + RANK + e, mask=e < tl.where(newest < low + N, ROPE, 0), other=0.0).to(dtype)
        mine = (at == newest)[:, None]
        c = tl.where(mine, c_new[None, :], c)
        r = tl.where(mine, r_new[None, :], r)
    line = query + heads[:, None] * q_head
    qc = tl.load(line + d[None, :], mask=mask, other=0.0)
    qr = tl.load(line + RANK + e[None, :], mask=real[:, None] & (e < ROPE)[None, :], other=0.0)
    m = tl.full([M], -1e30, tl.float32)
    mass = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, RP], tl.float32)
    for n in range(low, high, N):
        coming = n + N + tl.arange(0, N)
        c_next, r_next = _state(pages, places_next, coming, coming < high, page, dtype, PAGE, RANK, ROPE, RP, EP)
        places_next = _pages(table, coming + N, coming + N < high, PAGE)
        seen = n + tl.arange(0, N) < high
        m, mass, acc = _step(qc, qr, c, r, seen[None, :], m, mass, acc, scale, PRECISION)
        c = c_next
        r = r_next
    if low < length:
        cell = heads * splits + split
        tl.store(parts + cell[:, None] * RANK + d[None, :], acc, mask=mask)
        tl.store(stats + cell * 2, m, mask=real)
        tl.store(stats + cell * 2 + 1, mass, mask=real)


@fast_launch
@triton.jit
def latent_one_value_kernel(
    parts, stats, kv_lens, w, y, splits,
    HEADS: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
    BV: tl.constexpr, BS: tl.constexpr, N: tl.constexpr, MIN_TILES: tl.constexpr, S: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One request: merge the parts of S >= ``splits`` splits, BS at a time, and go from latent space to BV values of
    one head. Every program of a head merges: that is cheaper than a launch."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    TILES: tl.constexpr = (VALUE + BV - 1) // BV
    head = tl.program_id(0) // TILES
    v = (tl.program_id(0) % TILES) * BV + tl.arange(0, BV)
    d = tl.arange(0, RP)
    # A weight does not depend on the previous kernel, so it is loaded before the wait.
    rows = w + (head * (NOPE + VALUE) + NOPE + v)[:, None].to(tl.int64) * RANK
    b = tl.load(rows + d[None, :], mask=(v < VALUE)[:, None] & (d < RANK)[None, :], other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    length = tl.load(kv_lens)
    live = tl.cdiv(length, _span(length, splits, N, MIN_TILES))
    cell = head * splits
    s = tl.arange(0, S)
    m = tl.load(stats + (cell + s) * 2, mask=s < live, other=-1e30)
    mass = tl.load(stats + (cell + s) * 2 + 1, mask=s < live, other=0.0)
    most = tl.max(m, 0)
    total = tl.sum(mass * tl.exp2(m - most), 0)
    a = tl.zeros([RP], tl.float32)
    for first in range(0, live, BS):
        i = first + tl.arange(0, BS)
        there = i < live
        weight = tl.exp2(tl.load(stats + (cell + i) * 2, mask=there, other=-1e30) - most)
        at = parts + (cell + i)[:, None] * RANK + d[None, :]
        pieces = tl.load(at, mask=there[:, None] & (d < RANK)[None, :], other=0.0)
        a += tl.sum(pieces * weight[:, None], 0)
    # Rounded as the result of attention is that another launch stores.
    a = (a / total).to(w.dtype.element_ty).to(tl.float32)
    r = tl.sum(a[None, :] * b.to(tl.float32), 1)
    tl.store(y + head * VALUE + v, r.to(y.dtype.element_ty), mask=v < VALUE)


@fast_launch
@triton.jit
def latent_mixed_kernel(
    query, pages, table, query_start, kv_lens, out,
    q_row, q_head, table_row, page, requests, scale,
    HEADS: tl.constexpr, PAGE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, RP: tl.constexpr,
    EP: tl.constexpr, TOGETHER: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Any query lengths. Program (tile of queries, tile of TOGETHER heads); a line is one query of one head. Tiles are
    numbered as in ``mixed_kernel``."""
    TOKENS: tl.constexpr = M // TOGETHER
    number = tl.program_id(0)
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
        q_at = q_first + lines // TOGETHER
        heads = tl.program_id(1) * TOGETHER + lines % TOGETHER
        real = (lines < TOKENS * TOGETHER) & (q_at < count) & (heads < HEADS)
        position = length - count + q_at
        d = tl.arange(0, RP)
        e = tl.arange(0, EP)
        token = (begin + q_at).to(tl.int64)
        start = query + token[:, None] * q_row + heads[:, None] * q_head
        qc = tl.load(start + d[None, :], mask=real[:, None] & (d < RANK)[None, :], other=0.0)
        qr = tl.load(start + RANK + e[None, :], mask=real[:, None] & (e < ROPE)[None, :], other=0.0)
        end = length - count + tl.minimum(q_first + TOKENS, count)
        row_table = table + row.to(tl.int64) * table_row
        dtype: tl.constexpr = query.dtype.element_ty
        m = tl.full([M], -1e30, tl.float32)
        mass = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, RP], tl.float32)
        places = _pages(row_table, tl.arange(0, N), tl.arange(0, N) < end, PAGE)
        for n in range(0, end, N):
            at = n + tl.arange(0, N)
            c, r = _state(pages, places, at, at < end, page, dtype, PAGE, RANK, ROPE, RP, EP)
            places = _pages(row_table, at + N, at + N < end, PAGE)
            seen = at[None, :] <= position[:, None]
            m, mass, acc = _step(qc, qr, c, r, seen, m, mass, acc, scale, PRECISION)
        at = (token * HEADS + heads)[:, None] * RANK + d[None, :]
        mass = tl.where(mass > 0, mass, 1.0)  # padding lines may have seen no key
        y = (acc / mass[:, None]).to(out.dtype.element_ty)
        tl.store(out + at, y, mask=real[:, None] & (d < RANK)[None, :])


@fast_launch
@triton.jit
def latent_merge_kernel(
    parts, stats, kv_lens, out, splits,
    HEADS: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr, N: tl.constexpr, MIN_TILES: tl.constexpr,
    S: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge the splits' sums. Program (request, head). S >= splits."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(kv_lens + row)
    live = tl.arange(0, S) < tl.cdiv(length, _span(length, splits, N, MIN_TILES))
    d = tl.arange(0, RP)
    cell = (row * HEADS + tl.program_id(1)) * splits + tl.arange(0, S)
    m = tl.load(stats + cell * 2, mask=live, other=-1e30)
    mass = tl.load(stats + cell * 2 + 1, mask=live, other=0.0)
    weight = tl.exp2(m - tl.max(m, 0))
    x = tl.load(parts + cell[:, None] * RANK + d[None, :], mask=live[:, None] & (d < RANK)[None, :], other=0.0)
    y = tl.sum(x * weight[:, None], 0) / tl.sum(mass * weight, 0)
    to = out + (row * HEADS + tl.program_id(1)) * RANK
    tl.store(to + d, y.to(out.dtype.element_ty), mask=d < RANK)


@fast_launch
@triton.jit
def latent_value_kernel(
    x, w, y, tokens,
    HEADS: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
    BM: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """From latent space to values: program (tile of BV values of one head, BM tokens). ``x`` [T, HEADS, RANK]; ``y``
    [T, HEADS, VALUE]."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    TILES: tl.constexpr = (VALUE + BV - 1) // BV
    head = tl.program_id(0) // TILES
    v = (tl.program_id(0) % TILES) * BV + tl.arange(0, BV)
    t = tl.program_id(1) * BM + tl.arange(0, BM)
    there = t < tokens
    cell = t.to(tl.int64) * HEADS + head
    rows = w + (head * (NOPE + VALUE) + NOPE + v)[:, None].to(tl.int64) * RANK
    acc = tl.zeros([BM, BV], tl.float32)
    for k in range(0, RP, BK):
        d = k + tl.arange(0, BK)
        b = tl.load(rows + d[None, :], mask=(v < VALUE)[:, None] & (d < RANK)[None, :], other=0.0)
        a = tl.load(x + cell[:, None] * RANK + d[None, :], mask=there[:, None] & (d < RANK)[None, :], other=0.0)
        if BM == 1:
            acc += tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)[None, :]
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    to = y + cell[:, None] * VALUE + v[None, :]
    tl.store(to, acc.to(y.dtype.element_ty), mask=there[:, None] & (v < VALUE)[None, :])


@triton.jit
def _prefill_tile(
    qn, qr, m, mass, acc, at, inside, position, keys, rope, kv_row, rope_row, scale, NOPE: tl.constexpr,
    VALUE: tl.constexpr, ROPE: tl.constexpr, NP: tl.constexpr, VP: tl.constexpr, EP: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Update the running maximum, sum and product with keys and values of the tokens at positions ``at``."""
    k = tl.arange(0, NP)
    v = tl.arange(0, VP)
    e = tl.arange(0, EP)
    line = keys + at[:, None].to(tl.int64) * kv_row
    kn = tl.load(line + k[None, :], mask=inside[:, None] & (k < NOPE)[None, :], other=0.0)
    kr = tl.load(
        rope + at[:, None].to(tl.int64) * rope_row + e[None, :], mask=inside[:, None] & (e < ROPE)[None, :], other=0.0
    )
    value = tl.load(line + NOPE + v[None, :], mask=inside[:, None] & (v < VALUE)[None, :], other=0.0)
    s = tl.dot(qn, tl.trans(kn), input_precision=PRECISION)
    s = tl.dot(qr, tl.trans(kr), s, input_precision=PRECISION) * scale
    if MASKED:
        s = tl.where(at[None, :] <= position[:, None], s, float("-inf"))
    new = tl.maximum(m, tl.max(s, 1))
    alpha = tl.exp2(m - new)
    p = tl.exp2(s - new[:, None])
    mass = mass * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None] + tl.dot(p.to(value.dtype), value, input_precision=PRECISION)
    return new, mass, acc


@fast_launch
@triton.jit
def latent_prefill_kernel(
    q, rotated, kv, rope, query_start, out, q_row, kv_row, rope_row, requests, scale,
    HEADS: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr, ROPE: tl.constexpr, NP: tl.constexpr,
    VP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Whole prompts, with expanded keys and values: program (tile of M queries, head), numbered as in
    ``mixed_kernel``.

    ``q`` [T, HEADS * (NOPE + ROPE)], of which ``rotated`` [T, HEADS, ROPE] is the rotated part; ``kv`` [T, HEADS *
    (NOPE + VALUE)]; ``rope`` [T, ROPE]; ``out`` [T, HEADS, VALUE].
    """
    number = tl.program_id(0)
    head = tl.program_id(1)
    low = 0
    high = requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // M + middle <= number:
            low = middle
        else:
            high = middle
    begin = tl.load(query_start + low)
    count = tl.load(query_start + low + 1) - begin
    first = (number - (begin // M + low)) * M
    if first < count:
        position = first + tl.arange(0, M)
        real = position < count
        token = (begin + position).to(tl.int64)
        k = tl.arange(0, NP)
        v = tl.arange(0, VP)
        e = tl.arange(0, EP)
        qn = tl.load(
            q + token[:, None] * q_row + head * (NOPE + ROPE) + k[None, :], mask=real[:, None] & (k < NOPE)[None, :],
            other=0.0,
        )  # fmt: skip
        qr = tl.load(
            rotated + (token * HEADS + head)[:, None] * ROPE + e[None, :], mask=real[:, None] & (e < ROPE)[None, :],
            other=0.0,
        )  # fmt: skip
        keys = kv + begin.to(tl.int64) * kv_row + head * (NOPE + VALUE)
        ropes = rope + begin.to(tl.int64) * rope_row
        m = tl.full([M], -1e30, tl.float32)
        mass = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, VP], tl.float32)
        # Tiles that are visible to every query of this program need no mask.
        whole = (first + 1) // N * N
        for n in range(0, whole, N):
            at = n + tl.arange(0, N)
            m, mass, acc = _prefill_tile(
                qn, qr, m, mass, acc, at, at < count, position, keys, ropes, kv_row, rope_row, scale, NOPE, VALUE,
                ROPE, NP, VP, EP, False, PRECISION,
            )  # fmt: skip
        for n in range(whole, tl.minimum(first + M, count), N):
            at = n + tl.arange(0, N)
            m, mass, acc = _prefill_tile(
                qn, qr, m, mass, acc, at, at < count, position, keys, ropes, kv_row, rope_row, scale, NOPE, VALUE,
                ROPE, NP, VP, EP, True, PRECISION,
            )  # fmt: skip
        to = out + (token * HEADS + head)[:, None] * VALUE + v[None, :]
        tl.store(to, (acc / mass[:, None]).to(out.dtype.element_ty), mask=real[:, None] & (v < VALUE)[None, :])
