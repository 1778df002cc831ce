"""Drafts by the model's own layer for multi-token prediction: one token, known with the one before it."""

from __future__ import annotations

from collections.abc import Sequence

from evener.contracts.generation.drafter import Drafter


class PredictionDrafter(Drafter):
    """Proposes the token that was predicted behind the text as it is."""

    def __init__(self) -> None:
        self._next: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._next = []

    def predict(self, token: int) -> None:
        self._next = [token]

    def propose(self, count: int) -> Sequence[int]:
        return self._next[:count]
