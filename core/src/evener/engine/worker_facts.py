"""What a controller must know of a worker; plain data, so that it crosses processes. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from evener.contracts.state import StateSpec
from evener.errors import EngineError


@dataclass(frozen=True)
class WorkerFacts:
    """The worker's state and limits.

    Attributes:
        specs: one a state group.
        cuts: for each group how many of its blocks a slab of the pool holds.
        blocks: slabs in the pool, the null one included; block_size: tokens a block.
        max_reqs, max_seq_len, step_tokens: as resolved.
        media_rows: that it keeps of media.
        info: the run's manifest in brief.
    """

    specs: list[StateSpec]
    cuts: list[int]
    blocks: int
    block_size: int
    max_reqs: int
    max_seq_len: int
    step_tokens: int
    media_rows: int
    info: dict[str, Any]

    @property
    def kinds(self) -> list[tuple[str, int | None, str, int | None]]:
        """What a controller's state manager sees of each group's spec."""
        return [(spec.kind, spec.window, spec.per, spec.every) for spec in self.specs]


def agree(found: Sequence[WorkerFacts]) -> WorkerFacts:
    """What holds for all ranks, in their order: the smallest limits, and the words of the first.

    Raises:
        EngineError: ranks have state of different kinds or cuts, so that no block id could mean the same to all.
    """
    first = found[0]
    for rank, facts in enumerate(found):
        for what in ("kinds", "cuts", "block_size"):
            ours, theirs = getattr(first, what), getattr(facts, what)
            if ours != theirs:
                raise EngineError(
                    f"ranks disagree about their state: {what} is {ours} on rank 0 and {theirs} on rank {rank}; "
                    "run the same packages, backend and configuration on each"
                )
    if len(found) == 1:
        return first
    limits = ("blocks", "max_reqs", "max_seq_len", "step_tokens")
    least = {name: min(getattr(f, name) for f in found) for name in limits}
    ranks = [{key: f.info.get(key) for key in ("device", "backend", "memory", "rank")} for f in found]
    return replace(first, **least, info={**first.info, "max_model_len": least["max_seq_len"], "ranks": ranks})
