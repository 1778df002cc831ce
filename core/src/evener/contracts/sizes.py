"""Sizes along one axis of stored tensors, of which a rank may have a part."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from evener.contracts.declared import Span

#: A size along one axis: a number, of which this rank has all, or this rank's span.
Size = int | Span


def local_size(size: Size) -> int:
    """Number of elements that this rank has."""
    return size if isinstance(size, int) else size.size


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Spans of one tensor, in order; merged into one span if they are adjacent."""
    found = list(spans)
    together = all(a.stop == b.start for a, b in pairwise(found))
    return [Span(found[0].start, found[-1].stop, found[0].whole)] if together else found
