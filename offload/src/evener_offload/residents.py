"""Which experts of a layer are on the device: those that were used last. Torch-free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Wave:
    """Experts that are computed together.

    Attributes:
        slots: the slot of each.
        copied: whether all of them must be copied first; otherwise none.
        beside: whether no slot of the wave before is written.
    """

    slots: Mapping[int, int]
    copied: bool
    beside: bool = True


class Residents:
    """The experts in ``count`` slots; the least recently used one leaves first (LRU).

    Attributes:
        hits, misses: experts that steps needed, and that were in a slot, or were not.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.hits = self.misses = 0
        self._slot: OrderedDict[int, int] = OrderedDict()

    @property
    def experts(self) -> list[int]:
        """The expert in each slot; 0 in an empty one."""
        found = {slot: expert for expert, slot in self._slot.items()}
        return [found.get(slot, 0) for slot in range(self.count)]

    def waves(self, needed: Iterable[int]) -> Sequence[Wave]:
        """How the ``needed`` experts are computed, in order: first those that are in slots, then the others, copied to
        slots that the wave before does not use. If it uses all, they wait for it. The last ones stay in their slots."""
        wanted = sorted(set(needed))
        here = {expert: self._slot[expert] for expert in wanted if expert in self._slot}
        absent = [expert for expert in wanted if expert not in here]
        self.hits, self.misses = self.hits + len(here), self.misses + len(absent)
        for expert in here:
            self._slot.move_to_end(expert)
        found = [Wave(here, copied=False)] if here else []
        while absent:
            used = len(found[-1].slots) if found else 0
            # Half of the slots are computed with while the other half is filled.
            room = self.count - used if used or len(absent) <= self.count else -(-self.count // 2)
            now, absent = absent[: room or self.count], absent[room or self.count :]
            found.append(Wave({expert: self._place(expert) for expert in now}, copied=True, beside=room > 0))
        return found

    def _place(self, expert: int) -> int:
        """Give ``expert`` an empty slot, or that of the least recently used one."""
        slot = len(self._slot) if len(self._slot) < self.count else self._slot.popitem(last=False)[1]
        self._slot[expert] = slot
        return slot
