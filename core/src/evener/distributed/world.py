"""The ranks of a run: how they are numbered, and the groups in which they communicate. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evener.distributed.agreement import Agreement
from evener.errors import EngineError

if TYPE_CHECKING:
    import torch

    from evener.contracts.communicator import Communicator, CommunicatorFactory


@dataclass(frozen=True)
class World:
    """One worker's rank among ``size`` workers. The default is a single worker.

    ``rank = pp_rank * tp_size + tp_rank``, so the ranks of one tensor parallel group are neighbours: they communicate
    most.

    Raises:
        EngineError: the numbers contradict each other.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        inside = 0 <= self.tp_rank < self.tp_size and 0 <= self.pp_rank < self.pp_size
        place = self.pp_rank * self.tp_size + self.tp_rank, self.tp_size * self.pp_size
        if not inside or place != (self.rank, self.size):
            raise EngineError(
                f"{self} contradicts itself: size must be tp_size × pp_size, and rank pp_rank × tp_size + tp_rank"
            )

    @classmethod
    def of(cls, rank: int, tp_size: int = 1, pp_size: int = 1) -> World:
        """The world as rank ``rank`` sees it."""
        return cls(rank % tp_size, tp_size, rank // tp_size, pp_size, rank, tp_size * pp_size)

    @property
    def tp_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's tensor parallel group, which share its layers, in order."""
        first = self.rank - self.tp_rank
        return tuple(range(first, first + self.tp_size))

    @property
    def pp_ranks(self) -> tuple[int, ...]:
        """The ranks with this ``tp_rank`` in all pipeline stages, first stage first."""
        return tuple(range(self.tp_rank, self.size, self.tp_size))

    @property
    def first_stage(self) -> bool:
        """Whether this rank embeds the tokens."""
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank computes the logits and samples."""
        return self.pp_rank == self.pp_size - 1

    @property
    def name(self) -> str:
        """This rank's worker in messages."""
        parts = [f"stage {self.pp_rank} of {self.pp_size}"] * (self.pp_size > 1)
        parts += [f"part {self.tp_rank} of {self.tp_size}"] * (self.tp_size > 1)
        return f"worker of rank {self.rank} ({', '.join(parts)})" if parts else "worker"

    @property
    def reports(self) -> bool:
        """Whether this rank sends results to the controller. The other ranks of the last stage have the same ones."""
        return self.last_stage and self.tp_rank == 0


@dataclass(frozen=True)
class RankGroups:
    """A worker's rank and its communicators. A group of one rank has none.

    Attributes:
        tp: ranks that share this rank's layers.
        pp: this rank's pipeline stages, for the residual stream.
        ids: the same ranks as ``pp``, for sampled ids: they go the other way, and neither must wait for the other.
        device: index of the worker's device on its machine; ``local_size`` ranks of this run are on that machine.
    """

    world: World = World()
    tp: Communicator | None = None
    pp: Communicator | None = None
    ids: Communicator | None = None
    device: int = 0
    local_size: int = 1

    def open(self, factory: CommunicatorFactory) -> RankGroups:
        """Returns itself, because its groups are open."""
        del factory
        return self

    def min_across_ranks(self, values: Sequence[int], where: torch.device) -> list[int]:
        """The minimum of each value over all ranks. All ranks must call it at the same point."""
        return Agreement(self.pp, where).least(Agreement(self.tp, where).least(values))


@dataclass(frozen=True)
class RankPlacement:
    """What a worker process needs to join the others: its rank, its device, and the ``init_method`` of
    ``torch.distributed``, through which the ranks find each other."""

    world: World = World()
    device: int = 0
    local_size: int = 1
    init_method: str = ""

    def open(self, factory: CommunicatorFactory) -> RankGroups:
        """Open the groups. Waits until the other ranks do the same."""
        groups = {"tp": self.world.tp_ranks, "pp": self.world.pp_ranks, "ids": self.world.pp_ranks}
        opened = {name: factory(name, ranks, self.world.rank, self.world.size, self.init_method)
                  for name, ranks in groups.items() if len(ranks) > 1}  # fmt: skip
        return RankGroups(self.world, device=self.device, local_size=self.local_size, **opened)
