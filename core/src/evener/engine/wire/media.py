"""The media of one step, and how media limit what two prompts have in common. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from evener.contracts.media import MediaItem


class MediaOverlay(msgspec.Struct, frozen=True, array_like=True):
    """Media rows that replace token embeddings: ``count`` rows of the item with this digest, from its row ``first`` on,
    replace the embeddings of the step's tokens from ``token`` on."""

    token: int
    digest: bytes
    first: int
    count: int


class StepMedia(msgspec.Struct, frozen=True, array_like=True):
    """What one step does with media, in this order.

    Attributes:
        drops: digests of items that the worker drops.
        items: new items, which the worker stores; items that name an encoder are encoded first.
        overlays: media rows that replace token embeddings.
    """

    drops: list[bytes]
    items: list[MediaItem]
    overlays: list[MediaOverlay]


def overlapping_items(items: Sequence[MediaItem], start: int, end: int) -> Iterator[MediaItem]:
    """The items that stand for at least one of the positions ``start`` to ``end - 1``."""
    return (item for item in items if item.start < end and item.end > start)


def shared_prefix_length(items: Sequence[MediaItem], others: Sequence[MediaItem], length: int) -> int:
    """How many of the first ``length`` tokens two prompts share, given that they have the same token ids there. They
    stop sharing at the first item that only one of them has."""
    return min([length, *(at for at, _ in {(i.start, i.key) for i in items} ^ {(o.start, o.key) for o in others})])
