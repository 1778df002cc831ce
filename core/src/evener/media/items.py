"""What a step does with media, and what two prompts' media have in common. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from evener.contracts.media import MediaItem


class StepMedia(msgspec.Struct, frozen=True, array_like=True):
    """What one step does with media, in this order.

    Attributes:
        drops: digests of what the worker need not keep any longer.
        items: taken in and, with an encoder, encoded.
        overlays: ``(row of the step, digest, first, count)``: so many of an item's rows, from the ``first`` on, replace
            embeddings.
    """

    drops: list[bytes]
    items: list[MediaItem]
    overlays: list[tuple[int, bytes, int, int]]


def touched(items: Sequence[MediaItem], start: int, end: int) -> Iterator[MediaItem]:
    """Those that reach into positions ``start`` to ``end - 1``."""
    return (item for item in items if item.start < end and item.end > start)


def parted(items: Sequence[MediaItem], others: Sequence[MediaItem], length: int) -> int:
    """Of ``length`` tokens that two prompts have in common, how many stand for the same."""
    different = {item.key: item for item in items}
    for item in others:
        if different.pop(item.key, None) is None:
            different[item.key] = item
    return min([length, *(item.start for item in different.values())])
