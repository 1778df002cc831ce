"""What a device says of itself among its features."""

from __future__ import annotations

from collections.abc import Iterable


def number_of(word: str, features: Iterable[str], default: int) -> int:
    """The number in ``<word>:<number>`` among the features."""
    for feature in features:
        name, _, value = feature.partition(":")
        if name == word and value.isdigit():
            return int(value)
    return default
