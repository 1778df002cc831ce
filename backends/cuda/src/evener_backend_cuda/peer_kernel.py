"""An all-reduce in one launch: every rank stores its part where all ranks can read it, and sums all parts."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def peer_sum_kernel(
    x_ptr, peers_ptr, rounds_ptr, count, each, RANK: tl.constexpr, RANKS: tl.constexpr,
    BLOCKS: tl.constexpr, REGION: tl.constexpr, DATA: tl.constexpr, TILE: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Replace ``x`` [count] by the sum over the ranks; block b has the elements b * each to (b + 1) * each.

    ``peers`` int64 [RANKS]: addresses of the ranks' shared memory: int32 flags [BLOCKS, RANKS], and from byte
    DATA on two buffers of BLOCKS regions of REGION elements. ``rounds`` int32 [BLOCKS]: how often each block has run.

    A block stores its part, signals its round to the same block on each peer, and waits for their signals. The next
    round uses the other buffer. A peer that has started it has finished reading this one, so one wait in each round is
    enough.
    """
    block = tl.program_id(0)
    now = tl.load(rounds_ptr + block) + 1
    region = ((now & 1) * BLOCKS + block).to(tl.int64) * REGION
    kind = x_ptr.dtype.element_ty
    first = block * each
    mine = tl.multiple_of((tl.load(peers_ptr + RANK) + DATA).to(tl.pointer_type(kind)) + region, 16)
    for at in range(0, each, TILE):
        i = at + tl.arange(0, TILE)
        there = (i < each) & (first + i < count)
        tl.store(mine + i, tl.load(x_ptr + first + i, mask=there), mask=there)
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            flag = tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int32)) + block * RANKS + RANK
            tl.atomic_xchg(flag, now, sem="release", scope="sys")
    flags = tl.load(peers_ptr + RANK).to(tl.pointer_type(tl.int32)) + block * RANKS
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            seen = tl.atomic_add(flags + peer, 0, sem="acquire", scope="sys")
            while seen - now < 0:
                seen = tl.atomic_add(flags + peer, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    tl.store(rounds_ptr + block, now)
    for at in range(0, each, TILE):
        i = at + tl.arange(0, TILE)
        there = (i < each) & (first + i < count)
        total = tl.zeros([TILE], dtype=tl.float32)
        for peer in tl.static_range(RANKS):  # in rank order, so that all ranks have the same bits
            part = tl.multiple_of((tl.load(peers_ptr + peer) + DATA).to(tl.pointer_type(kind)) + region, 16)
            total += tl.load(part + i, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(x_ptr + first + i, total.to(kind), mask=there)
