"""ALiBi, attention with linear biases (Press et al. 2022): a position encoding used instead of rotary embedding."""

from __future__ import annotations


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slope of each of all ``heads`` heads: what an attention score loses per token of distance.

    For a power of two they are the powers of 2 ** (-8 / heads), from the first on. For other numbers: the slopes of the
    next smaller power of two n; then, for the remaining heads, the first, third, fifth, ... slope of 2n heads.
    """
    most = 1 << (heads.bit_length() - 1)
    near, far = ([2 ** (-8 * (i + 1) / count) for i in range(count)] for count in (most, 2 * most))
    return (*near, *far[::2][: heads - most])
