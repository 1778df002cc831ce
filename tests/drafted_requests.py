"""Requests of three kinds for engines with drafts, and drafts in each step, for a vocabulary of 11 ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evener.engine.controller.controller import Controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener_generation.drafting.model_drafter import ModelDrafter
from evener_generation.drafting.speculation import Speculation


def requests(answer: int = 24) -> list[NewRequest]:
    """Greedy, sampled, and greedy with log-probabilities; answers of ``answer`` tokens and one or two more."""
    asked = [Sampling(temperature=0.0), Sampling(temperature=0.9, seed=5), Sampling(temperature=0.0, logprobs=1)]
    return [
        NewRequest(id=f"r{at}", prompt=[1 + (at + i * i) % 9 for i in range(9 + 13 * at)], max_tokens=answer + at,
                   sampling=sampling)
        for at, sampling in enumerate(asked)
    ]  # fmt: skip


class Always(Speculation):
    """As many drafts as there is room for, also behind wrong ones."""

    def record(self, rows: Sequence[Any], on: bool, tokens: int) -> None:
        """Learn nothing."""


def always(controller: Controller) -> dict[tuple[str, int], list[int]]:
    """With drafts by the worker in each step that can have some. Returns what was proposed behind how many tokens of a
    request."""
    scheduler, seen = controller.scheduler, dict[tuple[str, int], list[int]]()
    scheduler.drafts = Always(ModelDrafter, length=4, max_samples=20, vocabulary=11)
    retire = scheduler.retire

    def watched(result: Any) -> Any:
        drafted = [row.request for row in scheduler._in_flight[0].rows if row.drafts]
        seen.update({(r.id, len(r.tokens)): ids for r, ids in zip(drafted, result.drafts, strict=True)})
        return retire(result)

    scheduler.retire = watched  # type: ignore[method-assign]
    return seen
