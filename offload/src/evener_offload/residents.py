"""Which experts of a layer are on the device: those that were used last, and guesses of what comes next. Torch-free."""

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
        copied: those of them that must be copied first.
    """

    slots: Mapping[int, int]
    copied: Collection[int] = ()

    @classmethod
    def of_copies(cls, slots: Mapping[int, int]) -> Wave:
        """A wave of which all are copied."""
        return cls(slots, tuple(slots))


class Residents:
    """The experts in ``count`` slots; the least recently used one leaves first (LRU).

    Attributes:
        hits, misses: experts that steps needed, and that were in a slot, or were not.
        guesses, right: experts that were guessed, and those of them that the next step needed.
        wasted: experts that were copied because of a guess, and that the next step did not need.
        copied: experts that got a slot.
        passing: experts numbered below it have slots elsewhere in captured steps (``captured_passing``). They get one
            here only because a step needs them or because they are guessed, and they leave first.
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
        """Half of the slots are computed with while the other half is filled."""
        return -(-self.count // 2)

    def waves(
        self, needed: Iterable[int], late: Collection[int] = (), elsewhere: Collection[int] = (),
        together: bool = False,
    ) -> Sequence[Wave]:  # fmt: skip
        """How the ``needed`` experts are computed, in order: first those that are in slots, then the others, copied to
        slots that the wave before does not use. If it uses all, they wait for it. The last ones stay in their slots.

        Args:
            late: experts whose copies are under way; of those that are in slots, they are the last.
            elsewhere: absent experts that are not computed here.
            together: all in one wave, if there are slots for all.
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
        """Give slots to experts that the next step will probably need, the likeliest first: to at most half as many as
        there are slots. Of the experts that are in slots, no guessed one leaves. Guesses that turn out wrong are the
        first to leave."""
        self._judge(())
        self._guessed = frozenset(guessed)
        self.guesses += len(self._guessed)
        ahead = self._place_ahead(guessed, max(1, self.count // 2), self._guessed)
        self._ahead = frozenset(ahead)
        return Wave.of_copies(ahead)

    def _place_ahead(self, guessed: Sequence[int], most: int, staying: Collection[int]) -> dict[int, int]:
        """Give slots to at most so many absent experts, of which none takes that of an expert that is ``staying``."""
        absent = [expert for expert in guessed if expert not in self._slot][:most]
        empty = self.count - len(self._slot)
        leaving = islice((each for each in self._slot if each not in staying), max(0, len(absent) - empty))
        leaves = [None] * min(empty, len(absent)) + list(leaving)
        return {expert: self._place(expert, each) for expert, each in zip(absent, leaves, strict=False)}

    def exchange(self, pairs: Iterable[tuple[int, int | None]]) -> Wave:
        """Give the first expert of each pair the slot of the second one, or an empty one (None)."""
        return Wave.of_copies({expert: self._place(expert, leaves) for expert, leaves in pairs})

    def learn(self, expert: int, needed: Collection[int]) -> Wave:
        """Give an absent expert the slot of the least recently used one that this step has not ``needed``, if any; not
        a passing one."""
        leaves = None
        if expert < self.passing:
            return Wave({})
        if len(self._slot) == self.count:
            leaves = next((each for each in self._slot if each not in needed), None)
            if leaves is None:
                return Wave({})
        return Wave.of_copies({expert: self._place(expert, leaves)})

    def _judge(self, needed: Sequence[int]) -> None:
        """Compare the last guess with what was needed."""
        self.right += len(self._guessed.intersection(needed))
        wrong = self._ahead.difference(needed)
        self.wasted += len(wrong)
        for expert in sorted(wrong):
            self._slot.move_to_end(expert, last=False)
        self._guessed = self._ahead = frozenset()

    def _place(self, expert: int, leaves: int | None = None) -> int:
        """Give ``expert`` the slot of the one that ``leaves``, or an empty one, or that of the least recently used."""
        if leaves is not None:
            slot = self._slot.pop(leaves)
        else:
            slot = len(self._slot) if len(self._slot) < self.count else self._slot.popitem(last=False)[1]
        self._slot[expert] = slot
        self.copied += 1
        return slot
