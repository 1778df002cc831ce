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
