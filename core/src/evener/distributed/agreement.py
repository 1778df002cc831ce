"""Numbers that all ranks agree on before they load weights: each rank gives its own, and all get the same result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from evener.contracts.communicator import Communicator

#: ``Agreement.common`` compares numbers below this one.
_LIMIT = 4096


class Agreement:
    """The ranks of ``group`` call the same methods in the same order. Without a group, a method returns what it gets.

    Args:
        where: a device whose tensors the group can send.
    """

    def __init__(self, group: Communicator | None = None, where: torch.device | str = "cpu") -> None:
        self._group, self._where = group, where

    def each(self, values: Sequence[int]) -> list[list[int]]:
        """The values of each rank, in the group's order. All give equally many."""
        if self._group is None:
            return [list(values)]
        import torch

        own = torch.tensor([list(values)], dtype=torch.int64, device=self._where)
        found: list[list[int]] = self._group.all_gather(own, dim=0).tolist()
        return found

    def least(self, values: Sequence[int]) -> list[int]:
        """The smallest of each value."""
        return [min(column) for column in zip(*self.each(values), strict=True)]

    def most(self, values: Sequence[int]) -> list[int]:
        """The largest of each value."""
        return [max(column) for column in zip(*self.each(values), strict=True)]

    def common(self, values: Sequence[int]) -> list[int]:
        """The numbers that every rank gives, ascending; without a group, in the order given."""
        if self._group is None:
            return list(values)
        return [n for n, everywhere in enumerate(self.least([n in values for n in range(_LIMIT)])) if everywhere]


#: Of a rank that has nothing to settle.
ALONE = Agreement()
