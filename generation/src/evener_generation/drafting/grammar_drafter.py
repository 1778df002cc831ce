"""Drafts of what a grammar forces, and no others: a JSON key costs one step and not one for each token."""

from __future__ import annotations

from collections.abc import Sequence

from evener.contracts.generation.drafter import Drafter


class GrammarDrafter(Drafter):
    """Guesses nothing: ``Speculation`` proposes what grammars force with any drafter that is not the worker's."""

    def extend(self, tokens: Sequence[int]) -> None:
        """The grammar knows the text."""

    def propose(self, count: int) -> Sequence[int]:
        return ()
