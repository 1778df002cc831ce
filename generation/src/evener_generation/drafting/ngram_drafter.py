"""Drafts by looking up the last tokens of a text in the text itself.

Answers often repeat their prompt or themselves: code that is edited, quotations, lists. Where the last tokens have
occurred before, what followed them then may follow again. The method is the prompt lookup decoding of A. Saxena (2023).
"""

from __future__ import annotations

from collections.abc import Sequence

from evener.contracts.generation.drafter import Drafter

#: How many last tokens are looked up; the longest match decides.
_SIZES = (5, 3, 2)
#: Tokens of a text that are indexed: the newest of what ``extend`` is first given, so that a long prompt takes
#: milliseconds.
_REACH = 8192


class NgramDrafter(Drafter):
    """Finds the newest earlier occurrence of the last 5, 3 or 2 tokens, and proposes what followed it."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        #: For each group of tokens the position behind its newest occurrence that something follows.
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        tokens = tokens[-_REACH:]
        for token in tokens:
            known = len(self._tokens)
            for size in _SIZES:
                if known >= size:
                    self._ends[tuple(self._tokens[known - size :])] = known
            self._tokens.append(token)

    def propose(self, count: int) -> Sequence[int]:
        for size in _SIZES:
            end = self._ends.get(tuple(self._tokens[-size:])) if len(self._tokens) > size else None
            if end is not None:
                return self._repeat(end, count)
        return ()

    def _repeat(self, start: int, count: int) -> list[int]:
        """``count`` tokens from ``start`` on. Where the text ends it goes on with what is proposed: a text that repeats
        itself every few tokens is continued at any length."""
        period = len(self._tokens) - start
        return [self._tokens[start + at % period] for at in range(count)]
