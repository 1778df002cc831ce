"""The communicator contract: collectives and messages between the ranks of one group.

Layers get their communicator as an argument; there is no global one, and a run with one rank has none. A process has
one rank in the *world*, and an index in each *group* that it belongs to. Only the factory gets the world's ranks; all
numbers on a ``Communicator`` are indices in the group, from 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CommunicatorCapabilities:
    """What a communicator can do.

    Attributes:
        dtypes: element types that it can reduce; tensors of other types are sent as bytes.
        capturable: its calls may be captured in a graph.
    """

    dtypes: frozenset[str] = frozenset({"float32"})
    capturable: bool = False


class Communicator(ABC):
    """One named group of ranks ("tp", "pp", "ep"). Every rank calls the same methods in the same order.

    Attributes:
        name: the group's name, as given to the factory.
        rank: this process's index in the group, 0 to ``size - 1``: its place in the factory's ``ranks``.
        size: number of ranks in the group, at least 2.
        capabilities: see ``CommunicatorCapabilities``.
    """

    name: str
    rank: int
    size: int
    capabilities: CommunicatorCapabilities

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks. Every rank must get the same bits, because every rank samples by itself. ``tensor`` is
        donated: it may be overwritten, and may be the result."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The tensors of all ranks (equal shapes), concatenated along ``dim`` in the group's order."""

    @abstractmethod
    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The sum over the ranks; each rank gets its part of ``dim``, which ``size`` divides."""

    @abstractmethod
    def all_to_all(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Exchange rows: ``send[r]`` rows of ``tensor`` go to index r of the group, and ``receive[r]`` rows come from
        it. Both lists have ``size`` entries, with this rank's own; 0 is allowed. Returns [sum(receive), …] in the
        group's order."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """The tensor of index ``source``, on every rank. ``tensor`` is donated, and may be the result."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Send to index ``target``, another rank of the group; returns when ``tensor`` may be reused."""

    def isend(self, tensor: torch.Tensor, target: int) -> Callable[[], object]:
        """(optional) Like ``send``, but does not wait for the other rank. Returns a function that waits; until it has
        been called, ``tensor`` must not change. Default: ``send``."""
        self.send(tensor, target)
        return lambda: None

    @abstractmethod
    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Receive into ``tensor``, and return it, from index ``source``, another rank of the group."""

    def irecv(self, tensor: torch.Tensor, source: int) -> Callable[[], torch.Tensor]:
        """(optional) Like ``receive``, but returns at once, so that the sender does not wait while this rank does other
        work. Returns a function that waits for the tensor and returns it; call each once, in the order of the
        ``irecv`` calls. Default: that function is ``receive``, which is right if messages are buffered."""
        return lambda: self.receive(tensor, source)

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called it."""

    def close(self) -> None:
        """(optional) Leave the group. Default: nothing."""
        return


class CommunicatorFactory(Protocol):
    """Opens this process's end of a group. Only the group's ranks call it; ranks that share several groups open them in
    the same order. ``evener.backend.torch_communicator.open_torch_communicator`` takes the name of a library of
    ``torch.distributed`` and then the same arguments."""

    def __call__(self, name: str, ranks: Sequence[int], rank: int, world_size: int, init_method: str) -> Communicator:
        """This process's end of group ``name``.

        Args:
            ranks: world ranks of the group, ascending, each once; ``ranks[i]`` is index i of the group.
            rank: this process's world rank; one of ``ranks``.
            world_size: number of ranks in the world.
            init_method: the rendezvous, as ``torch.distributed.init_process_group`` takes it.
        """
