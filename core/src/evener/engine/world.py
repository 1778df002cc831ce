"""The world: which rank a worker is, how ranks are laid out, and its ends of the groups it belongs to. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from evener.errors import EngineError

if TYPE_CHECKING:
    from evener.contracts.communicator import Communicator


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
    def tp_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every stage, in order. Every rank opens every group, so all of them are listed."""
        return tuple(
            tuple(range(first, first + self.tp_size)) for first in range(0, self.size, self.tp_size)
        )  # fmt: skip

    @property
    def pp_groups(self) -> tuple[tuple[int, ...], ...]:
        """For every tensor-parallel rank, the ranks that hold its part of each stage, first stage first."""
        return tuple(tuple(range(first, self.size, self.tp_size)) for first in range(self.tp_size))

    @property
    def tp_ranks(self) -> tuple[int, ...]:
        """The ranks that share this rank's layers."""
        return self.tp_groups[self.pp_rank]

    @property
    def pp_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's column through the stages."""
        return self.pp_groups[self.tp_rank]

    @property
    def first_stage(self) -> bool:
        """Whether this rank embeds the tokens."""
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank has the head and samples."""
        return self.pp_rank == self.pp_size - 1

    @property
    def reports(self) -> bool:
        """Whether this rank's results are the ones that are read; the others of the last stage have the same."""
        return self.last_stage and self.tp_rank == 0


@dataclass(frozen=True)
class Ranks:
    """A worker's place and its ends of its groups; a group of one has no communicator."""

    world: World = World()
    tp: Communicator | None = None
    pp: Communicator | None = None
