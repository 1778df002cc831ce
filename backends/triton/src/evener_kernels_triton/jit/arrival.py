"""Programs that add up something together, in one launch: the last to come finishes it."""

import triton
import triton.language as tl


@triton.jit
def last_to_come(arrived, at, coming):
    """Whether this program is the last of ``coming`` that count themselves at ``arrived[at]``. That one sees what the
    others stored before, if it reads past the nearest cache; the counter is zero again behind it."""
    tl.debug_barrier()
    last = tl.atomic_add(arrived + at, 1, sem="acq_rel") == coming - 1
    if last:
        tl.store(arrived + at, 0)
    return last
