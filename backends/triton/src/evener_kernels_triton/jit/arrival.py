"""Sums that several programs of one launch compute together: the last program to arrive finishes them."""

import triton
import triton.language as tl


@triton.jit
def is_last_program(arrived, at, coming):
    """Whether this program is the last of ``coming`` programs that count at ``arrived[at]``. It sees what the others
    stored before, if its loads bypass the L1 cache; it resets the counter to zero."""
    tl.debug_barrier()
    last = tl.atomic_add(arrived + at, 1, sem="acq_rel") == coming - 1
    if last:
        tl.store(arrived + at, 0)
    return last


@triton.jit
def sum_of_spans(acc, parts, arrived, SPLITS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """(the sums [HIGH, WIDE] of one tile over SPLITS spans, whether this program has them). Axes 0 and 1 of the grid
    are tiles, axis 2 is spans, and ``acc`` is this program's part. The last to finish adds all parts in the order of
    spans, so the result does not depend on timing."""
    finish = True
    if SPLITS > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        cells = tl.arange(0, HIGH)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
        own = parts + tile.to(tl.int64) * (SPLITS * HIGH * WIDE) + cells
        tl.store(own + tl.program_id(2) * (HIGH * WIDE), acc)
        finish = is_last_program(arrived, tile, SPLITS)
        if finish:
            acc = tl.zeros([HIGH, WIDE], tl.float32)
            for other in tl.static_range(SPLITS):
                acc += tl.load(own + other * (HIGH * WIDE), cache_modifier=".cg")
    return acc, finish
