"""Greedy and random choice over the vocabulary, and the packed mask. A row is cut into chunks; a second kernel chooses
among the chunks' best. Ties go to the lowest id."""

import triton
import triton.language as tl


@triton.jit
def _hash32(x):
    """lowbias32 (Wellons) of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


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
            start = tl.load(seed + row).to(tl.uint32, bitcast=True)
            count = tl.load(position + row).to(tl.uint32, bitcast=True)
            stream = _hash32(_hash32(start) + count * 0x9E3779B9)
            bits = _hash32(stream ^ _hash32(at.to(tl.uint32)))
            uniform = ((bits >> 8).to(tl.float32) + 0.5) * (1.0 / 16777216.0)
            score = score / heat - tl.log(-tl.log(uniform))
    value, index = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(values + row * chunks + chunk, value)
    tl.store(ids + row * chunks + chunk, chunk * BLOCK + index)


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
