"""Which experts of a layer are in slots: those that were used last, and those that are guessed to come next. Does not
import torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True)
class Wave:
    """Experts that are computed together.

    Attributes:
        slots: the slot of each.
        copied: the experts that must be copied first.
    """

    slots: Mapping[int, int]
    copied: Collection[int] = ()

    @classmethod
    def of_copies(cls, slots: Mapping[int, int]) -> Wave:
        """A wave whose experts are all copied."""
        return cls(slots, tuple(slots))


class Residents:
    """The experts in ``count`` slots; the least recently used one leaves first (LRU).

    Attributes:
        hits, misses: how many experts steps needed that were in a slot, and that were not.
        guesses, right: how many experts were guessed, and how many of these the next step needed.
        wasted: how many experts were copied because of a guess, and not needed by the next step.
        copied: how many experts got a slot.
        passing: experts with numbers below it pass through other slots in captured steps (``captured_passing``). They
            get a slot here only if an eager step needs them or if they are guessed, and they leave first.
    """

    def __init__(self, count: int) -> None:
        self.count, self.passing = count, 0
        self.hits = self.misses = self.guesses = self.right = self.wasted = self.copied = 0
        self._slot: OrderedDict[int, int] = OrderedDict()
        #: The experts guessed for the next step, and those of them that were copied.
        self._guessed: frozenset[int] = frozenset()
        self._ahead: frozenset[int] = frozenset()

    @property
    def slots(self) -> Mapping[int, int]:
        """The slot of each expert that is in one."""
        return self._slot

    @property
    def half(self) -> int:
        """Slots in a half, rounded up. The device computes with one half while the other half is filled."""
        return -(-self.count // 2)

    def waves(
        self, needed: Iterable[int], late: Collection[int] = (), elsewhere: Collection[int] = (),
        together: bool = False,
    ) -> Sequence[Wave]:  # fmt: skip
        """The waves in which the ``needed`` experts are computed, in order. First come the experts in slots. Then come
        the missing ones, copied to slots that the wave before does not use; if that wave uses all slots, the copies
        wait for it. The experts of the last waves stay in their slots.

        Args:
            late: experts whose copies are under way. Of the experts in slots, they are computed last.
            elsewhere: missing experts that the host computes.
            together: one wave, if there are slots for all.
        """
        found = self._waves(needed, late, elsewhere, together)
        if self.passing:
            for expert in [each for each in reversed(self._slot) if each < self.passing]:
                self._slot.move_to_end(expert, last=False)
        return found

    def _waves(
        self, needed: Iterable[int], late: Collection[int], elsewhere: Collection[int], together: bool
    ) -> Sequence[Wave]:
        wanted = sorted(set(needed))
        self._judge(wanted)
        wanted = [expert for expert in wanted if expert not in elsewhere]
        here = [expert for expert in wanted if expert in self._slot]
        absent = [expert for expert in wanted if expert not in self._slot]
        self.hits, self.misses = self.hits + len(here), self.misses + len(absent)
        if together and 0 < len(wanted) <= self.count:
            for expert in here:
                self._slot.move_to_end(expert)
            new = {expert: self._place(expert) for expert in absent}
            return [Wave({**{expert: self._slot[expert] for expert in here}, **new}, tuple(new))]
        half = self.half
        parts = [[each for each in here if each not in late], [each for each in here if each in late]]
        if len(absent) > self.count - len(here):
            last = parts.pop() or parts.pop()
            parts += [last[:-half], last[-half:]]
        found = []
        for part in filter(None, parts):
            for expert in part:
                self._slot.move_to_end(expert)
            found.append(Wave({expert: self._slot[expert] for expert in part}))
        while absent:
            used = len(found[-1].slots) if found else 0
            room = self.count - used if used or len(absent) <= self.count else half
            now, absent = absent[: room or self.count], absent[room or self.count :]
            found.append(Wave.of_copies({expert: self._place(expert) for expert in now}))
        return found

    def ahead(self, guessed: Sequence[int]) -> Wave:
        """Give slots to experts that the next step will probably need, the likeliest first: at most half of the slots.
        No guessed expert leaves its slot for another one. Wrong guesses leave first."""
        self._judge(())
        self._guessed = frozenset(guessed)
        self.guesses += len(self._guessed)
        ahead = self._place_ahead(guessed, max(1, self.count // 2), self._guessed)
        self._ahead = frozenset(ahead)
        return Wave.of_copies(ahead)

    def _place_ahead(self, guessed: Sequence[int], most: int, staying: Collection[int]) -> dict[int, int]:
        """Give slots to at most ``most`` of the guessed experts that have none. Experts in ``staying`` keep theirs."""
        absent = [expert for expert in guessed if expert not in self._slot][:most]
        empty = self.count - len(self._slot)
        leaving = islice((each for each in self._slot if each not in staying), max(0, len(absent) - empty))
        leaves = [None] * min(empty, len(absent)) + list(leaving)
        return {expert: self._place(expert, each) for expert, each in zip(absent, leaves, strict=False)}

    def exchange(self, pairs: Iterable[tuple[int, int | None]]) -> Wave:
        """Give the first expert of each pair the slot of the second one, or an empty slot (None)."""
        return Wave.of_copies({expert: self._place(expert, leaves) for expert, leaves in pairs})

    def learn(self, expert: int, needed: Collection[int]) -> Wave:
        """Give an expert without a slot that of the least recently used expert which this step has not ``needed``. No
        copies, if there is none, or if the expert passes (``passing``)."""
        leaves = None
        if expert < self.passing:
            return Wave({})
        if len(self._slot) == self.count:
            leaves = next((each for each in self._slot if each not in needed), None)
            if leaves is None:
                return Wave({})
        return Wave.of_copies({expert: self._place(expert, leaves)})

    def _judge(self, needed: Sequence[int]) -> None:
        """Compare the last guess with the needed experts."""
        self.right += len(self._guessed.intersection(needed))
        wrong = self._ahead.difference(needed)
        self.wasted += len(wrong)
        for expert in sorted(wrong):
            self._slot.move_to_end(expert, last=False)
        self._guessed = self._ahead = frozenset()

    def _place(self, expert: int, leaves: int | None = None) -> int:
        """Give ``expert`` the slot of ``leaves``; if that is None, an empty slot, or that of the least recently used
        expert. Returns the slot."""
        if leaves is not None:
            slot = self._slot.pop(leaves)
        else:
            slot = len(self._slot) if len(self._slot) < self.count else self._slot.popitem(last=False)[1]
        self._slot[expert] = slot
        self.copied += 1
        return slot
