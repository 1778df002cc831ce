"""What a controller must know of a worker; plain data, so that it crosses processes. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from evener.contracts.state import StateSpec


@dataclass(frozen=True)
class WorkerFacts:
    """The worker's state and limits.

    Attributes:
        specs: one a state group.
        cuts: for each group how many of its blocks a slab of the pool holds.
        blocks: slabs in the pool, the null one included; block_size: tokens a block.
        max_reqs, max_seq_len, step_tokens: as resolved.
        info: the run's manifest in brief.
    """

    specs: list[StateSpec]
    cuts: list[int]
    blocks: int
    block_size: int
    max_reqs: int
    max_seq_len: int
    step_tokens: int
    info: dict[str, Any]
