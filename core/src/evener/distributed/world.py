"""The world: which rank a worker is, how ranks are laid out, and its ends of the groups it belongs to. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evener.errors import EngineError

if TYPE_CHECKING:
    import torch

    from evener.contracts.communicator import Communicator, CommunicatorFactory
    from evener.distributed.launched import Launched


@dataclass(frozen=True)
class World:
    """One worker's place among ``size`` of them; the default is a world of one.

    ``rank = pp_rank * tp_size + tp_rank``: the ranks that share each layer are neighbours, because they talk most.

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
                f"{self} is no place in a world: size is tp_size × pp_size, and rank is pp_rank × tp_size + tp_rank"
            )

    @classmethod
    def of(cls, rank: int, tp_size: int = 1, pp_size: int = 1) -> World:
        """The place of rank ``rank``."""
        return cls(rank % tp_size, tp_size, rank // tp_size, pp_size, rank, tp_size * pp_size)

    @property
    def tp_ranks(self) -> tuple[int, ...]:
        """The ranks that share this rank's layers, in order."""
        first = self.rank - self.tp_rank
        return tuple(range(first, first + self.tp_size))

    @property
    def pp_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's column through the stages, first stage first."""
        return tuple(range(self.tp_rank, self.size, self.tp_size))

    @property
    def first_stage(self) -> bool:
        """Whether this rank embeds the tokens."""
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank has the head and samples."""
        return self.pp_rank == self.pp_size - 1

    @property
    def name(self) -> str:
        """What a person calls this rank's worker."""
        parts = [f"stage {self.pp_rank} of {self.pp_size}"] * (self.pp_size > 1)
        parts += [f"part {self.tp_rank} of {self.tp_size}"] * (self.tp_size > 1)
        return f"worker of rank {self.rank} ({', '.join(parts)})" if parts else "worker"

    @property
    def reports(self) -> bool:
        """Whether this rank's results are the ones that are read; the others of the last stage have the same."""
        return self.last_stage and self.tp_rank == 0


@dataclass(frozen=True)
class Ranks:
    """A worker's place and its ends of its groups; a group of one has no communicator.

    Attributes:
        ids: the same ranks as ``pp``: sampled ids go against the stream, and neither waits for the other.
        device: the worker's device on its machine, on which ``local`` ranks of this run live.
    """

    world: World = World()
    tp: Communicator | None = None
    pp: Communicator | None = None
    ids: Communicator | None = None
    device: int = 0
    local: int = 1

    def open(self, factory: CommunicatorFactory) -> Ranks:
        """Itself: whoever made it has opened its groups."""
        del factory
        return self

    def least(self, values: Sequence[int], where: torch.device) -> list[int]:
        """The smallest of each value over all ranks; every rank calls it at the same point."""
        if self.world.size == 1:
            return list(values)
        import torch

        found = torch.tensor([list(values)], dtype=torch.int64, device=where)
        for group in filter(None, (self.tp, self.pp)):
            found = group.all_gather(found, dim=0).amin(0, keepdim=True)
        return [int(value) for value in found[0].tolist()]


@dataclass(frozen=True)
class Place:
    """What a worker process is told: its place, its device, and where the ranks meet (``init_method`` as
    ``torch.distributed`` takes it)."""

    world: World = World()
    device: int = 0
    local: int = 1
    init_method: str = ""

    @classmethod
    def of(cls, launched: Launched, tp_size: int, pp_size: int) -> Place:
        """The place of a process that was started together with others."""
        return cls(World.of(launched.rank, tp_size, pp_size), launched.local_rank, launched.local_size, "env://")

    def open(self, factory: CommunicatorFactory) -> Ranks:
        """Meet the others; waits for them."""
        groups = {"tp": self.world.tp_ranks, "pp": self.world.pp_ranks, "ids": self.world.pp_ranks}
        opened = {
            name: factory(name, ranks, self.world.rank, self.world.size, self.init_method)
            for name, ranks in groups.items() if len(ranks) > 1
        }  # fmt: skip
        return Ranks(self.world, device=self.device, local=self.local, **opened)
