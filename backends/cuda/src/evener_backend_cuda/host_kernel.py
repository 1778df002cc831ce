"""One launch that copies rows to the host, waits for its answer, and copies that back."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["vectors", "pairs"])
def exchange_kernel(
    x_ptr, to_x_ptr, vectors, ids_ptr, to_ids_ptr, weights_ptr, to_weights_ptr, pairs, found_ptr, result_ptr,
    ready_ptr, done_ptr, order_ptr, READY: tl.constexpr, TILE: tl.constexpr, FEW: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Copy ``x`` int32 [4 vectors], ``ids`` and ``weights`` int32 [pairs] to page-locked memory, store READY in the
    word ``ready``, wait until the word ``done`` is not 0, copy ``found`` to ``result`` int32 [4 vectors], and make
    ``done`` 0 again. One program, so that one thread stores the word after the others' rows.

    One thread looks at ``done``: reads of one word of the host's memory come one after another, each a microsecond
    and more, so with 16 warps that look the last one sees it 40 µs late.

    ``order``: an int32 of the device's memory. An addition to it, in the order of the whole system, is the fence
    between rows and words: the host's memory need not know such additions.
    """
    x_count = vectors * 4  # so the compiler knows that 16 bytes are inside or outside
    for at in range(0, x_count, TILE):
        i = at + tl.arange(0, TILE)
        tl.store(to_x_ptr + i, tl.load(x_ptr + i, mask=i < x_count), mask=i < x_count)
    for at in range(0, pairs, FEW):
        i = at + tl.arange(0, FEW)
        tl.store(to_ids_ptr + i, tl.load(ids_ptr + i, mask=i < pairs), mask=i < pairs)
        tl.store(to_weights_ptr + i, tl.load(weights_ptr + i, mask=i < pairs), mask=i < pairs)
    tl.debug_barrier()
    tl.atomic_add(order_ptr, 1, sem="acq_rel", scope="sys")
    tl.store(ready_ptr, READY)
    looks = tl.arange(0, FEW) == 0
    words = done_ptr + tl.zeros([FEW], tl.int32)
    seen = tl.sum(tl.load(words, mask=looks, other=0, volatile=True))
    while seen == 0:
        seen = tl.sum(tl.load(words, mask=looks, other=0, volatile=True))
    tl.atomic_add(order_ptr, 1, sem="acq_rel", scope="sys")
    tl.debug_barrier()
    for at in range(0, x_count, TILE):
        i = at + tl.arange(0, TILE)
        tl.store(result_ptr + i, tl.load(found_ptr + i, mask=i < x_count, volatile=True), mask=i < x_count)
    tl.store(done_ptr, 0)
