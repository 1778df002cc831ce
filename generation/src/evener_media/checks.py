"""Checks a prompt's media before they reach the engine, which does not check them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from evener.contracts.media import MediaItem, make_item
from evener.errors import RequestError


def validated_media(items: Sequence[MediaItem], hidden: int, rows: int) -> list[MediaItem]:
    """A prompt's media; embedding rows are split into pieces of at most ``rows``, which is what one engine step takes.
    The engine checks their positions.

    Raises:
        RequestError: rows are not of width ``hidden``, or not float32.
    """
    found: list[MediaItem] = []
    for item in items:
        if not item.encoder and (item.shape != [item.rows, hidden] or item.dtype != "float32"):
            what = f"the rows at token {item.start} are {item.shape} {item.dtype}"
            raise RequestError(f"{what}; this model takes [n, {hidden}] float32", "media")
        found += [item] if item.encoder or item.rows <= rows else _split_rows(item, rows)
    return found


def _split_rows(item: MediaItem, max_rows: int) -> Iterator[MediaItem]:
    rows = item.array()
    return (make_item(item.start + at, rows[at : at + max_rows]) for at in range(0, item.rows, max_rows))
