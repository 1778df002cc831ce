"""Kernels over heads: norm, rotation and the write into pages, one pass over a projection's rows."""

import triton
import triton.language as tl

from evener_kernels_triton.jit.elements import stored_heads
from evener_kernels_triton.jit.launch import fast_launch


@triton.jit
def _norm_and_rotate(row, d, inside, weight, eps, offset, cos_sin, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
            NORM: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Heads [n, D] at ``row`` [n, 1], normalised and rotated, in float32. ``cos_sin`` points at the token's angles."""
    HALF: tl.constexpr = ROTARY // 2
    if INTERLEAVED:
        other = d ^ 1
        angle = d // 2
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
    else:
        other = tl.where(d < HALF, d + HALF, d - HALF)
        angle = d % HALF if HALF > 0 else d
        sign = tl.where(d < HALF, -1.0, 1.0)
    turns = d < ROTARY
    x = tl.load(row + d[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(row + other[None, :], mask=inside & turns[None, :], other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        real = d < D
        x = x * scale * (tl.load(weight + d, mask=real, other=0.0).to(tl.float32) + offset)[None, :]
        gain = tl.load(weight + other, mask=turns, other=0.0).to(tl.float32) + offset
        partner = partner * scale * gain[None, :]
    cos = tl.load(cos_sin + angle, mask=turns, other=1.0)
    sin = tl.load(cos_sin + HALF + angle, mask=turns, other=0.0) * sign
    return x * cos[None, :] + partner * sin[None, :]


@fast_launch
@triton.jit
def rotary_kernel(
    positions, x, y, cos_sin, heads, x_row, x_head, y_row, y_head,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Rotate heads: H heads of one token for each program."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * H + tl.arange(0, H)
    d = tl.arange(0, DP)
    inside = (head < heads)[:, None] & (d < D)[None, :]
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * ROTARY
    row = x + token * x_row + head[:, None] * x_head
    rotated = _norm_and_rotate(row, d, inside, x, 0.0, 0.0, angles, ROTARY, INTERLEAVED, False, D)
    tl.store(y + token * y_row + head[:, None] * y_head + d[None, :], rotated.to(y.dtype.element_ty), mask=inside)


@fast_launch
@triton.jit
def write_kernel(
    slots, key, value, keys, values, key_scales, value_scales, key_row, key_head, value_row, value_head, key_page,
    value_page, kv_heads, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, H: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Write heads into the token's slot: H heads of one token for each program."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * H + tl.arange(0, H)
    d = tl.arange(0, DP)
    slot = tl.load(slots + token).to(tl.int64)
    cell = (slot // PAGE, slot % PAGE)
    inside = (head < kv_heads)[:, None] & (d < D)[None, :]
    k = tl.load(key + token * key_row + head[:, None] * key_head + d[None, :], mask=inside)
    at = cell[0] * key_page + (head * PAGE + cell[1])[:, None] * D + d[None, :]
    k = stored_heads(k, key_scales, head, head < kv_heads, KIND, keys.dtype.element_ty)
    tl.store(keys + at, k, mask=inside)
    inside = (head < kv_heads)[:, None] & (d < DV)[None, :]
    v = tl.load(value + token * value_row + head[:, None] * value_head + d[None, :], mask=inside)
    at = cell[0] * value_page + (head * PAGE + cell[1])[:, None] * DV + d[None, :]
    v = stored_heads(v, value_scales, head, head < kv_heads, KIND, values.dtype.element_ty)
    tl.store(values + at, v, mask=inside)


@fast_launch
@triton.jit
def norm_rotary_write_kernel(
    positions, slots, qkv, q_norm, k_norm, cos_sin, query, keys, values, key_scales, value_scales,
    qkv_row, key_page, value_page, eps, offset,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, H: tl.constexpr, OVERLAP: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """What follows a QKV projection: H heads of one token for each program; first queries, then keys, then values.

    A program has heads of one kind only, so it loads one norm and stores to one place.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    Q_TILES: tl.constexpr = (HEADS + H - 1) // H
    K_TILES: tl.constexpr = (KV_HEADS + H - 1) // H
    d = tl.arange(0, DP)
    row = qkv + token * qkv_row
    if tile < Q_TILES:
        head = tile * H + tl.arange(0, H)
        inside = (head < HEADS)[:, None] & (d < D)[None, :]
        angles = cos_sin + tl.load(positions + token).to(tl.int64) * ROTARY
        rotated = _norm_and_rotate(
            row + head[:, None] * D, d, inside, q_norm, eps, offset, angles, ROTARY, INTERLEAVED, NORM, D
        )
        tl.store(query + (token * HEADS + head[:, None]) * D + d[None, :], rotated.to(query.dtype.element_ty), inside)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        page, place = slot // PAGE, slot % PAGE
        if tile < Q_TILES + K_TILES:
            head = (tile - Q_TILES) * H + tl.arange(0, H)
            inside = (head < KV_HEADS)[:, None] & (d < D)[None, :]
            angles = cos_sin + tl.load(positions + token).to(tl.int64) * ROTARY
            rotated = _norm_and_rotate(
                row + (HEADS + head[:, None]) * D, d, inside, k_norm, eps, offset, angles, ROTARY, INTERLEAVED, NORM, D
            )
            at = page * key_page + (head * PAGE + place)[:, None] * D + d[None, :]
            # Rounded first, as where the steps are apart.
            k = rotated.to(query.dtype.element_ty)
            k = stored_heads(k, key_scales, head, head < KV_HEADS, KIND, keys.dtype.element_ty)
            tl.store(keys + at, k, mask=inside)
        else:
            head = (tile - Q_TILES - K_TILES) * H + tl.arange(0, H)
            inside = (head < KV_HEADS)[:, None] & (d < DV)[None, :]
            v = tl.load(row + (HEADS + KV_HEADS) * D + head[:, None] * DV + d[None, :], mask=inside)
            at = page * value_page + (head * PAGE + place)[:, None] * DV + d[None, :]
            v = stored_heads(v, value_scales, head, head < KV_HEADS, KIND, values.dtype.element_ty)
            tl.store(values + at, v, mask=inside)
