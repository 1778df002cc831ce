"""Greedy and random choice over the vocabulary, and the packed mask. A row is cut into chunks; a second kernel chooses
among the chunks' best. Ties go to the lowest id."""

import triton
import triton.language as tl

from evener_kernels_triton.jit.launch import launched


@triton.jit
def _hash32(x):
    """lowbias32 (Wellons) of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(seed, position, ids):
    """Noise of int32 (seed, position) and token ids, as the contract fixes it."""
    start = seed.to(tl.uint32, bitcast=True)
    count = position.to(tl.uint32, bitcast=True)
    bits = _hash32(_hash32(_hash32(start) + count * 0x9E3779B9) ^ _hash32(ids.to(tl.uint32)))
    uniform = tl.minimum(((bits >> 8).to(tl.float32) + 0.5) * (1.0 / 16777216.0), 0.999999940395355224609375)
    return -tl.log(-tl.log(uniform))


@launched
@triton.jit
def best_kernel(
    logits, temperature, seed, position, values, ids, row_stride, vocab, chunks,
    RANDOM: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk). With RANDOM the score of an id is logit / temperature plus Gumbel noise from (seed,
    position, id); rows of temperature 0 or less have no noise."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * row_stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    if RANDOM:
        heat = tl.load(temperature + row)
        if heat > 0:
            score = score / heat + _gumbel(tl.load(seed + row), tl.load(position + row), at)
    # A logit that is no number loses: where it won, whoever it was compared with last would be named, though that may
    # be a place behind the vocabulary, and the next step reads the row of that id.
    score = tl.where(score == score, score, float("-inf"))
    value, index = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(values + row * chunks + chunk, value)
    tl.store(ids + row * chunks + chunk, chunk * BLOCK + index)


@triton.jit
def _key(score):
    """int32 in the order of float32."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score(key):
    """The inverse of ``_key``."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _above(line, heat, best, key, vocab, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Over ids whose score has a larger key: how many there are, or their mass relative to the best."""
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        score = tl.load(line + at, mask=at < vocab, other=float("-inf")).to(tl.float32) / heat
        weight = tl.exp(score - best) if MASS else tl.full([BLOCK], 1.0, tl.float32)
        total += tl.where((_key(score) > key) & (at < vocab), weight, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _lowest(line, heat, best, low, limit, vocab, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest key, from ``low`` on, with less than ``limit`` above it: what is there belongs to the kept."""
    high = _key(best).to(tl.int64)
    while low < high:
        middle = low + (high - low) // 2
        if _above(line, heat, best, middle.to(tl.int32), vocab, MASS, BLOCK) < limit:
            high = middle
        else:
            low = middle + 1
    return low


@launched
@triton.jit
def filtered_kernel(
    logits, temperature, top_k, top_p, min_p, seed, position, out, row_stride, vocab, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): top-k, then top-p over what is left, then min-p, then the best with noise. Nothing is sorted: the
    bounds are found by bisection over the scores' bits, and of ids with the score of a bound the lowest stay."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * row_stride
    heat = tl.load(temperature + row)
    cold = heat <= 0
    heat = tl.where(cold, 1.0, heat)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(line + at, mask=at < vocab, other=float("-inf")).to(tl.float32))
    top = tl.max(best, 0) / heat
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    floor = tl.load(min_p + row)
    bound = tl.full([], -2147483648, tl.int64)
    ties = tl.full([], 2147483647, tl.int32).to(tl.float32)
    if (k > 0) & (k < vocab) & (cold == 0):
        bound = _lowest(line, heat, top, bound, k.to(tl.float32), vocab, False, BLOCK)
        ties = k.to(tl.float32) - _above(line, heat, top, bound.to(tl.int32), vocab, False, BLOCK)
    if (p < 1) & (cold == 0):
        each = tl.exp(_score(bound.to(tl.int32)) - top)
        total = _above(line, heat, top, bound.to(tl.int32), vocab, True, BLOCK)
        if bound > -2147483648:
            total += ties * each
        first = _lowest(line, heat, top, bound, p * total, vocab, True, BLOCK)
        left = p * total - _above(line, heat, top, first.to(tl.int32), vocab, True, BLOCK)
        stay = tl.maximum(tl.ceil(left / tl.exp(_score(first.to(tl.int32)) - top)), 1.0)
        ties = tl.where(first > bound, stay, tl.minimum(stay, ties))
        bound = first
    chosen = tl.full([], float("-inf"), tl.float32)
    where = tl.full([], 0, tl.int32)
    seen = tl.full([], 0.0, tl.float32)
    place = tl.load(position + row)
    start = tl.load(seed + row)
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        score = tl.load(line + at, mask=at < vocab, other=float("-inf")).to(tl.float32) / heat
        if cold == 0:
            key = _key(score).to(tl.int64)
            equal = ((key == bound) & (at < vocab)).to(tl.float32)
            rank = seen + tl.cumsum(equal, 0) - equal
            seen += tl.sum(equal, 0)
            stays = ((key > bound) | ((equal > 0) & (rank < ties))) & (tl.exp(score - top) >= floor)
            score = tl.where(stays & (at < vocab), score + _gumbel(start, place, at), float("-inf"))
        value, index = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
        if value > chosen:
            chosen = value
            where = begin + index
    tl.store(out + row, where)


@launched
@triton.jit
def choose_kernel(values, ids, out, chunks, CHUNKS: tl.constexpr, OVERLAP: tl.constexpr):
    """Program (row): the best of its chunks."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    value = tl.load(values + row * chunks + c, mask=c < chunks, other=float("-inf"))
    _, index = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out + row, tl.load(ids + row * chunks + index))


@launched
@triton.jit
def apply_mask_kernel(logits, mask, y, row_stride, mask_row, vocab, BLOCK: tl.constexpr):
    """Logits of ids whose bit is 0 become -inf."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    word = tl.load(mask + row * mask_row + at // 32, mask=inside, other=0)
    value = tl.load(logits + row * row_stride + at, mask=inside)
    value = tl.where(((word >> (at % 32)) & 1) == 1, value, float("-inf"))
    tl.store(y + row * vocab + at, value.to(y.dtype.element_ty), mask=inside)
