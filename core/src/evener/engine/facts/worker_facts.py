"""What a started worker reports to its controller: plain data, which can cross processes. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from evener.contracts.state import StateSpec
from evener.engine.facts.engine_info import EngineInfo, RankInfo
from evener.errors import EngineError


@dataclass(frozen=True)
class WorkerFacts:
    """The worker's state and limits.

    Attributes:
        specs: one for each state group.
        cuts: for each group, how many of its blocks one slab of the pool holds.
        slabs: those of the pool, including the null slab.
        block_size: tokens of a block.
        max_reqs, max_seq_len, step_tokens: the resolved limits of the configuration.
        kept_slabs: how many slabs the connector can keep.
        info: what the front end is told.
    """

    specs: list[StateSpec]
    cuts: list[int]
    slabs: int
    block_size: int
    max_reqs: int
    max_seq_len: int
    step_tokens: int
    info: EngineInfo
    kept_slabs: int = 0

    @property
    def kinds(self) -> list[tuple[str, int | None, str, int | None]]:
        """(kind, window, per, every) of each group's spec: all that the controller's state manager reads of it."""
        return [(spec.kind, spec.window, spec.per, spec.every) for spec in self.specs]


def merge_facts(found: Sequence[WorkerFacts]) -> WorkerFacts:
    """The facts that hold for all ranks: the smallest limits, and the rest of rank 0. ``found`` is ordered by rank.

    Raises:
        EngineError: ranks have state of different kinds or cuts; a block id would not mean the same on all of them.
    """
    first = found[0]
    for rank, facts in enumerate(found):
        for what in ("kinds", "cuts", "block_size"):
            if (ours := getattr(first, what)) != (theirs := getattr(facts, what)):
                raise EngineError(f"ranks disagree about their state: {what} is {ours} on rank 0 and {theirs} on rank "
                                  f"{rank}; run the same packages, backend and configuration on each")  # fmt: skip
    if len(found) == 1:
        return first
    names = ("slabs", "max_reqs", "max_seq_len", "step_tokens", "kept_slabs")
    least = {name: min(getattr(facts, name) for facts in found) for name in names}
    ranks = [RankInfo(**{name: getattr(f.info, name) for name in RankInfo.__struct_fields__}) for f in found]
    info = msgspec.structs.replace(first.info, max_model_len=least["max_seq_len"], ranks=ranks)
    return replace(first, **least, info=info)
