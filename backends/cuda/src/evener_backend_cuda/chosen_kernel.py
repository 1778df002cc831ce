"""Kernels of ``chosen_experts``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pairs", "experts", "most", "part"])
def split_kernel(
    ids_ptr, held_ptr, to_ids_ptr, slots_ptr, copies_ptr, experts_ptr, used_ptr, pairs, experts, most, part,
    HELD: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """``split_chosen``, in one program. ``EXPERTS``: the power of two from ``experts`` on. Slots that are not used get
    expert 0, so that biases of theirs can be read."""
    e = tl.arange(0, EXPERTS)
    chosen = tl.zeros([EXPERTS], tl.int32)
    for at in range(0, pairs, PAIRS):
        i = at + tl.arange(0, PAIRS)
        ids = tl.load(ids_ptr + i, mask=i < pairs, other=-1)
        chosen = tl.maximum(chosen, tl.max((ids[:, None] == e[None, :]).to(tl.int32), axis=0))
    if HELD:
        chosen = tl.where(tl.load(held_ptr + e, mask=e < experts, other=0) < 0, chosen, 0)
    rank = tl.cumsum(chosen, 0)
    used = tl.minimum((tl.sum(chosen) * part + 128) // 256, most)
    there = (chosen > 0) & (rank <= used)
    tl.store(slots_ptr + e, tl.where(there, rank - 1, -1), mask=e < experts)
    tl.store(copies_ptr + e, there.to(tl.int32), mask=e < experts)
    for at in range(0, most, EXPERTS):
        tl.store(experts_ptr + at + e, tl.zeros([EXPERTS], tl.int32), mask=at + e < most)
    tl.store(used_ptr, used)
    tl.debug_barrier()
    tl.store(experts_ptr + rank - 1, e, mask=there)
    for at in range(0, pairs, PAIRS):
        i = at + tl.arange(0, PAIRS)
        ids = tl.load(ids_ptr + i, mask=i < pairs, other=0)
        slot = tl.load(slots_ptr + ids, mask=i < pairs, other=-1)
        tl.store(to_ids_ptr + i, tl.where(slot >= 0, experts, ids), mask=i < pairs)


@triton.jit
def copy_kernel(sources, targets, words, experts_ptr, used_ptr, TENSORS: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy a tile of row ``experts[i]`` of one of the sources to row i of its target. Programs: [tiles of all tensors,
    slots]; those of slots that are not used end at once."""
    slot = tl.program_id(1)
    if slot < tl.load(used_ptr):
        expert = tl.load(experts_ptr + slot).to(tl.int64)
        tile = tl.program_id(0)
        for t in tl.static_range(TENSORS):
            tiles = tl.cdiv(words[t], TILE)
            if (tile >= 0) & (tile < tiles):
                i = tile * TILE + tl.arange(0, TILE)
                row = tl.load(sources[t] + expert * words[t] + i, mask=i < words[t])
                tl.store(targets[t] + slot.to(tl.int64) * words[t] + i, row, mask=i < words[t])
            tile -= tiles
