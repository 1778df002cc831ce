"""Rows that stand for tokens, checked before they reach an engine, which trusts them."""

from __future__ import annotations

from collections.abc import Iterator

from evener.contracts.media import MediaItem, MediaPrompt, make_item
from evener.errors import RequestError


def checked(prompt: str | list[int] | MediaPrompt, hidden: int, rows: int) -> list[MediaItem]:
    """A prompt's media; given rows in pieces of at most ``rows``, which is what an engine takes at a time. Where they
    lie is the engine's to judge.

    Raises:
        RequestError: rows have another width than the model's ``hidden``, or are not float32.
    """
    found: list[MediaItem] = []
    for item in prompt.media if isinstance(prompt, MediaPrompt) else ():
        if not item.encoder and (item.shape != [item.rows, hidden] or item.dtype != "float32"):
            what = f"the rows at token {item.start} are {item.shape} {item.dtype}"
            raise RequestError(f"{what}; this model takes [n, {hidden}] float32", "media")
        found += [item] if item.encoder or item.rows <= rows else _pieces(item, rows)
    return found


def _pieces(item: MediaItem, most: int) -> Iterator[MediaItem]:
    rows = item.array()
    return (make_item(item.start + at, rows[at : at + most]) for at in range(0, item.rows, most))
