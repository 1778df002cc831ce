"""Biases and penalties on logits in place, and the largest log-probabilities of a row without sorting it."""

import triton
import triton.language as tl

from evener_kernels_triton.jit.launch import fast_launch
from evener_kernels_triton.jit.sampling import _key, _score


@fast_launch
@triton.jit
def add_bias_kernel(
    logits, ids, values, until, position, row_stride, entries, MINE: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Program (row, part of the entries). The first entry of an id adds the values of all entries with that id, so no
    two programs write the same logit and the order of sums is fixed."""
    row = tl.program_id(0).to(tl.int64)
    mine = tl.program_id(1) * MINE + tl.arange(0, MINE)
    now = tl.load(position + row)
    at = row * entries + mine
    on = (mine < entries) & (now < tl.load(until + at, mask=mine < entries, other=0))
    id = tl.load(ids + at, mask=on, other=-1)
    total = tl.zeros([MINE], tl.float32)
    first = on
    for begin in range(0, entries, OTHERS):
        other = begin + tl.arange(0, OTHERS)
        there = row * entries + other
        live = (other < entries) & (now < tl.load(until + there, mask=other < entries, other=0))
        same = tl.load(ids + there, mask=live, other=-2)[None, :] == id[:, None]
        value = tl.load(values + there, mask=live, other=0.0)
        total += tl.sum(tl.where(same, value[None, :], 0.0), 1)
        first = first & (tl.sum((same & (other[None, :] < mine[:, None])).to(tl.int32), 1) == 0)
    place = logits + row * row_stride + id
    tl.store(place, tl.load(place, mask=first, other=0.0) + total, mask=first)


@fast_launch
@triton.jit
def count_kernel(
    tokens, slots, prompt, lengths, counts, token_stride, longest, vocab, SEEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, part of its sequence): count how often each id was generated; the sign bit marks ids that occur
    anywhere in the sequence."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length = tl.minimum(tl.load(lengths + row), longest)
    line = tokens + tl.load(slots + row).to(tl.int64) * token_stride
    id = tl.load(line + place, mask=place < length, other=0)
    count = counts + row * vocab + id
    tl.atomic_or(count, tl.full([BLOCK], SEEN, tl.int32), mask=place < length)
    tl.atomic_add(count, tl.full([BLOCK], 1, tl.int32), mask=(place < length) & (place >= tl.load(prompt + row)))


@fast_launch
@triton.jit
def penalize_kernel(
    logits, tokens, slots, lengths, counts, repetition, frequency, presence, row_stride, token_stride, longest, vocab,
    SEEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, part of its sequence): of all places of an id, the one that resets its count changes the logit.
    Only ids in the sequence are touched, however large the vocabulary is."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length = tl.minimum(tl.load(lengths + row), longest)
    line = tokens + tl.load(slots + row).to(tl.int64) * token_stride
    id = tl.load(line + place, mask=place < length, other=0)
    taken = tl.atomic_xchg(counts + row * vocab + id, tl.full([BLOCK], 0, tl.int32), mask=place < length)
    mine = (place < length) & (taken != 0)
    times = (taken & ~SEEN).to(tl.float32)
    at = logits + row * row_stride + id
    x = tl.load(at, mask=mine, other=0.0)
    factor = tl.load(repetition + row)
    x = tl.where(x > 0, x / factor, x * factor) - tl.load(frequency + row) * times
    tl.store(at, x - tl.where(times > 0, tl.load(presence + row), 0.0), mask=mine)


@fast_launch
@triton.jit
def chunk_top_logprobs_kernel(
    logits, peaks, sums, keys, ids, row_stride, vocab, chunks, top, NONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): its largest logit, its sum of exponentials relative to that, and its ``top`` largest, best
    first, as sortable keys; NONE where it has fewer."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * row_stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    peak = tl.max(score, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks + row * chunks + chunk, peak)
    tl.store(sums + row * chunks + chunk, tl.sum(tl.exp(score - base), 0))
    key = tl.where(at < vocab, _key(score), NONE)
    for rank in range(0, top):
        best, index = tl.max(key, 0, return_indices=True, return_indices_tie_break_left=True)
        out = (row * chunks + chunk) * top + rank
        tl.store(keys + out, best)
        tl.store(ids + out, chunk * BLOCK + index)
        key = tl.where(tl.arange(0, BLOCK) == index, NONE, key)


@fast_launch
@triton.jit
def logprobs_kernel(
    logits, picked, peaks, sums, keys, ids, chosen, values, top_ids, row_stride, chunks, top,
    NONE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program (row): the log-sum-exp over chunks, and the merge of their sorted lists."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    peak = tl.load(peaks + row * chunks + c, mask=c < chunks, other=float("-inf"))
    most = tl.max(peak, 0)
    part = tl.load(sums + row * chunks + c, mask=c < chunks, other=0.0)
    norm = most + tl.log(tl.sum(tl.where(part > 0, part * tl.exp(peak - most), 0.0), 0))
    tl.store(chosen + row, tl.load(logits + row * row_stride + tl.load(picked + row)).to(tl.float32) - norm)
    lists = (row * chunks + c) * top
    used = tl.zeros([CHUNKS], tl.int32)
    for rank in range(0, top):
        head = tl.load(keys + lists + used, mask=(c < chunks) & (used < top), other=NONE)
        best, index = tl.max(head, 0, return_indices=True, return_indices_tie_break_left=True)
        used += (c == index).to(tl.int32)
        tl.store(values + row * top + rank, _score(best) - norm)
        place = tl.sum(tl.where(c == index, used - 1, 0), 0)
        tl.store(top_ids + row * top + rank, tl.load(ids + (row * chunks + index) * top + place))
