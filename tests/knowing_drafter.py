"""A drafter that knows the answers, and makes each third proposal wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from evener.contracts.generation.drafter import Drafter


class KnowingDrafter(Drafter):
    """Proposes what follows in ``answers``, whole texts that a test sets. A wrong proposal is the neighbouring id."""

    answers: ClassVar[list[list[int]]] = []

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens

    def propose(self, count: int) -> Sequence[int]:
        known = len(self.tokens)
        whole = next((each for each in self.answers if each[:known] == self.tokens), self.tokens)
        return [abs(id - ((at + known) % 3 == 0)) for at, id in enumerate(whole[known : known + count])]
