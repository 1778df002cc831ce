"""Greedy and random sampling over the vocabulary, and the packed mask. A row is split into chunks; a second kernel
chooses among the best of each chunk. Ties go to the lowest id."""

import triton
import triton.language as tl

from evener_kernels_triton.jit.launch import fast_launch


@triton.jit
def _hash32(x):
    """The hash lowbias32 (Chris Wellons) of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(seed, position, ids):
    """Noise of int32 (seed, position) and token ids, as the contract fixes it."""
    start = seed.to(tl.uint32, bitcast=True)
    count = position.to(tl.uint32, bitcast=True)
    bits = _hash32(_hash32(_hash32(start) + count * 0x9E3779B9) ^ _hash32(ids.to(tl.uint32)))
    # 24 bits, so that int32 holds them: not every compiler converts uint32 to a float.
    small = (bits >> 8).to(tl.int32).to(tl.float32)
    uniform = tl.minimum((small + 0.5) * (1.0 / 16777216.0), 0.999999940395355224609375)
    return -tl.log(-tl.log(uniform))


@fast_launch
@triton.jit
def chunk_argmax_kernel(
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
        temp = tl.load(temperature + row)
        if temp > 0:
            score = score / temp + _gumbel(tl.load(seed + row), tl.load(position + row), at)
    # NaN must lose. If it won, the result could be an id past the end of the vocabulary, and the next step reads the
    # embedding row of that id.
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
def _sum_above(line, temp, best, key, vocab, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Of ids whose score has a larger key: their number, or their probability mass relative to the best."""
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        score = tl.load(line + at, mask=at < vocab, other=float("-inf")).to(tl.float32) / temp
        weight = tl.exp(score - best) if MASS else tl.full([BLOCK], 1.0, tl.float32)
        total += tl.where((_key(score) > key) & (at < vocab), weight, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _bisect_bound(line, temp, best, low, limit, vocab, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest key, from ``low`` on, with less than ``limit`` above it; ids with this key are kept."""
    high = _key(best).to(tl.int64)
    while low < high:
        middle = low + (high - low) // 2
        if _sum_above(line, temp, best, middle.to(tl.int32), vocab, MASS, BLOCK) < limit:
            high = middle
        else:
            low = middle + 1
    return low


@fast_launch
@triton.jit
def filtered_sample_kernel(
    logits, temperature, top_k, top_p, min_p, seed, position, out, row_stride, vocab, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): top-k, then top-p over what is left, then min-p, then the best with noise. Nothing is sorted: the
    bounds are found by bisection over the scores' bits, and of ids with exactly a bound's score the lowest are kept."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * row_stride
    temp = tl.load(temperature + row)
    is_greedy = temp <= 0
    temp = tl.where(is_greedy, 1.0, temp)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(line + at, mask=at < vocab, other=float("-inf")).to(tl.float32))
    top = tl.max(best, 0) / temp
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    floor = tl.load(min_p + row)
    bound = tl.full([], -2147483648, tl.int64)
    ties = tl.full([], 2147483647, tl.int32).to(tl.float32)
    if (k > 0) & (k < vocab) & (is_greedy == 0):
        bound = _bisect_bound(line, temp, top, bound, k.to(tl.float32), vocab, False, BLOCK)
        ties = k.to(tl.float32) - _sum_above(line, temp, top, bound.to(tl.int32), vocab, False, BLOCK)
    if (p < 1) & (is_greedy == 0):
        each = tl.exp(_score(bound.to(tl.int32)) - top)
        total = _sum_above(line, temp, top, bound.to(tl.int32), vocab, True, BLOCK)
        if bound > -2147483648:
            total += ties * each
        first = _bisect_bound(line, temp, top, bound, p * total, vocab, True, BLOCK)
        left = p * total - _sum_above(line, temp, top, first.to(tl.int32), vocab, True, BLOCK)
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
        score = tl.load(line + at, mask=at < vocab, other=float("-inf")).to(tl.float32) / temp
        if is_greedy == 0:
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


@fast_launch
@triton.jit
def merge_argmax_kernel(values, ids, out, chunks, CHUNKS: tl.constexpr, OVERLAP: tl.constexpr):
    """Program (row): the best of its chunks."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    value = tl.load(values + row * chunks + c, mask=c < chunks, other=float("-inf"))
    _, index = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out + row, tl.load(ids + row * chunks + index))


@fast_launch
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
