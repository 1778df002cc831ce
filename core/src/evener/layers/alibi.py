"""Attention with linear biases (Press et al. 2022), which some models have instead of rotated heads."""

from __future__ import annotations


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """What a score of each of ``heads`` heads loses for each token of distance, before ranks share them.

    For a power of two these are 2 ** (-8 / heads), its square, and so on. Other numbers have the slopes of the next
    smaller power of two and, for the heads that are left, every other one of twice as many.
    """
    most = 1 << (heads.bit_length() - 1)
    near, far = ([2 ** (-8 * (i + 1) / count) for i in range(count)] for count in (most, 2 * most))
    return (*near, *far[::2][: heads - most])
