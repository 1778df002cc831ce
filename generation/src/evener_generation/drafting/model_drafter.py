"""Drafts by a draft model, a head or the model's own layer: the worker finds the tokens in the step that checks them,
so none are known here."""

from __future__ import annotations

from collections.abc import Sequence

from evener.contracts.generation.drafter import BY_WORKER, Drafter


class ModelDrafter(Drafter):
    """Proposes as many tokens as it is asked for."""

    by_worker = True

    def extend(self, tokens: Sequence[int]) -> None:
        """The worker's own tables have the text."""

    def propose(self, count: int) -> Sequence[int]:
        return [BY_WORKER] * count
