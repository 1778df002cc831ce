"""What calibration remembers of a tensor: for each head the largest magnitude, and how often each one occurred."""

from __future__ import annotations

import torch

#: Bins of the histogram: 64 for each power of two from 2^-24 to 2^24, so that a percentile is right within 1.1 %.
_PER_OCTAVE, _LEAST, _BINS = 64, -24, 64 * 48


class Observer:
    """Sees numbers [tokens, heads, dim] piece by piece; holds a few kilobytes a head, however many there are."""

    def __init__(self, heads: int) -> None:
        self._largest = torch.zeros(heads)
        self._counts = torch.zeros(heads, _BINS, dtype=torch.int64)

    def see(self, values: torch.Tensor) -> None:
        """Count ``values``.

        Raises:
            ValueError: one of them is NaN or infinite.
        """
        sizes = values.detach().cpu().float().abs().transpose(0, 1).flatten(1)  # [heads, tokens * dim]
        if not bool(sizes.isfinite().all()):
            raise ValueError("a key or value is NaN or infinite")
        self._largest = torch.maximum(self._largest, sizes.amax(1))
        bins = ((sizes.clamp(min=2.0**_LEAST).log2() - _LEAST) * _PER_OCTAVE).floor().long().clamp(0, _BINS - 1)
        self._counts.scatter_add_(1, bins, torch.ones_like(bins))

    def limits(self, percentile: float | None) -> list[float]:
        """Of each head the largest magnitude; with ``percentile`` (over 0, at most 100) one that so many of a hundred
        numbers do not exceed."""
        if percentile is None:
            return [float(largest) for largest in self._largest]
        wanted = (self._counts.sum(1, keepdim=True) * (percentile / 100)).ceil().long().clamp(min=1)
        first = (self._counts.cumsum(1) >= wanted).long().argmax(1)
        ends = torch.exp2((first + 1).float() / _PER_OCTAVE + _LEAST)
        return [float(limit) for limit in torch.minimum(ends, self._largest)]
