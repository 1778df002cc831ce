"""The torch ops that the simulated chip has kernels for. All others run on the host.

They are what a first port of torch to a chip covers: fills, arithmetic, comparisons, reductions, gathers and matrix
products; no sort, no prefix sum, no counting of values.
"""

from __future__ import annotations

_FILLED = "fill_ zero_ zeros ones full arange normal_ uniform_ copy_ _to_copy clone"
_ARITHMETIC = """
add add_ sub sub_ mul mul_ div div_ neg reciprocal rsqrt sqrt square exp log tanh sigmoid silu silu_ relu gelu cos sin
pow abs logaddexp clamp clamp_ clamp_min clamp_max clamp_max_ maximum minimum floor floor_divide remainder
bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_right_shift __rshift__ __and__ __xor__ logical_and logical_not
logical_or
"""
_COMPARED = "eq ne lt le gt ge where masked_fill masked_fill_ isnan isneginf isfinite"
_REDUCED = "sum mean amax amin max min argmax any all _softmax _log_softmax"
_MOVED = """
index index_select index_put_ _index_put_impl_ index_copy_ index_copy gather scatter_ scatter cat stack embedding
repeat_interleave repeat flip tril triu
"""
_PRODUCTS = "mm bmm addmm matmul linear baddbmm"

#: Names as in torch's schemas, without overloads.
KERNELS = frozenset(
    f"aten::{name}" for name in " ".join((_FILLED, _ARITHMETIC, _COMPARED, _REDUCED, _MOVED, _PRODUCTS)).split()
)
