"""The connector contract: state that leaves the device's prefix cache is kept elsewhere, as in host memory or on
another server, and is brought back when it is needed.

A connector has two halves. The controller's half, a ``Connector``, decides: it is told which blocks leave the prefix
cache, and it finds what it keeps of a request's prefix. The workers' half, a ``BlockMover`` on each rank, copies blocks
as the first half says in ``Plan.moves``; plans are in the same order on all ranks, so both halves agree without asking.

A block comes back as a block of the prefix cache. The first half takes free blocks of the pool, sets their keys, and
lets the next plan copy into them. The request waits meanwhile (``ready``); then it starts as with any prefix hit. A
copy may take longer than the plan that began it. A plan that needs the copy, or reuses a block that it still writes to,
names it in ``BlockMoves.waits``.

A package announces one in ``Descriptor.connectors``, as a class with two static functions::

    controller(config: Config, facts: WorkerFacts, state: StateManager) -> Connector
    worker(assembly: Assembly, storage: torch.Tensor) -> BlockMover
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import msgspec


class BlockMove(msgspec.Struct, frozen=True, array_like=True):
    """One block of one state group, and the place of its contents elsewhere, which both halves know by this number."""

    group: int
    block: int
    place: int


class BlockTransfer(msgspec.Struct, frozen=True, array_like=True):
    """Copies from places to blocks. ``id`` is never used again."""

    id: int
    moves: list[BlockMove]


class BlockMoves(msgspec.Struct, frozen=True, kw_only=True):
    """What ranks do with a plan, before its rows.

    Attributes:
        out: blocks to copy to places. The plan's rows, and its ``back``, may write to these blocks.
        back: copies to begin, after those of ``out``. They may take longer than the plan.
        waits: transfers that have to be over: begun with earlier plans, before anything else; those of this plan's
            ``back``, before its rows.
    """

    out: list[BlockMove] = []
    back: list[BlockTransfer] = []
    waits: list[int] = []


class StartingRequest(Protocol):
    """What is read of a scheduler's request.

    Attributes:
        message: its ``NewRequest``.
        tokens: known ids.
        exclusive: it must have the whole pool for itself, without the prefix cache.
        parent: the request from whose state it starts; None: from the prefix cache.
        table: its ``BlockTable`` while it runs.
    """

    message: Any
    tokens: list[int]
    exclusive: bool
    parent: Any
    table: Any

    @property
    def id(self) -> str:
        """Its id."""

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether it starts without the prefix cache."""


class Connector:
    """The controller's half; this one keeps nothing. The scheduler calls it between two steps, so it must be quick.

    Attributes:
        counters: what it has counted since the start, for a server's metrics.
    """

    counters: Mapping[str, int] = MappingProxyType({})

    def ready(self, request: StartingRequest, busy: bool) -> bool:
        """Whether a waiting request may start. If more of its prefix is kept, this call begins to bring it back.
        Without other work (not ``busy``) the request may always start."""
        return True

    def started(self, request: StartingRequest) -> None:
        """The request has its table, with the blocks of the prefix cache, and may run in the next plan."""

    def dropped(self, request: StartingRequest) -> None:
        """The request has ended, perhaps while it was waiting."""

    def give_back(self) -> bool:
        """Running requests lack blocks: release those that waiting requests hold. Returns whether there were any."""
        return False

    def moves(self) -> BlockMoves | None:
        """What the next plan says. Called once for each plan."""
        return None

    def done(self, transfers: Sequence[int]) -> None:
        """A rank has reported these transfers as over. Other ranks may not have finished them."""


class BlockMover(ABC):
    """A rank's half.

    Attributes:
        slabs: for how many slabs of the pool it has places; 0: it does not count in slabs.
    """

    slabs: int = 0

    @abstractmethod
    def begin(self, moves: BlockMoves) -> None:
        """Submit what ``moves`` says, ahead of the step. Must not wait for the device."""

    @abstractmethod
    def finished(self) -> list[int]:
        """The transfers that are over and were not reported before."""

    def counters(self) -> Mapping[str, int]:
        """(optional) What it has counted since the start, for a server's metrics. Default: nothing."""
        return {}

    def close(self) -> None:
        """(optional) The engine ends: release what is not memory, such as a port. Default: does nothing."""
        return
