"""What several parts of a connector have counted, as one mapping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


class Counted(Mapping[str, int]):
    """The counts of all ``parts`` now, whose names differ. (A ``ChainMap`` would find every name in its first
    ``Counter``, as 0.)"""

    def __init__(self, *parts: Mapping[str, int]) -> None:
        self._parts = parts

    def __getitem__(self, name: str) -> int:
        for part in self._parts:
            if name in part:
                return part[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for part in self._parts for name in part)

    def __len__(self) -> int:
        return sum(map(len, self._parts))
