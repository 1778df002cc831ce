"""The communicator contract: how the ranks of one group talk. Passed to layers, never global; one rank has none.

A process has two numbers: its rank in the *world*, which only the factory is told, and its index in each *group* that
it belongs to. Everything on a ``Communicator`` counts inside the group, from 0.
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
        dtypes: element types that it reduces; others are sent as bytes.
        capturable: its calls may be part of a graph.
    """

    dtypes: frozenset[str] = frozenset({"float32"})
    capturable: bool = False


class Communicator(ABC):
    """One named group of ranks ("tp", "pp", "ep"). Every rank calls the same methods in the same order.

    Attributes:
        name: the group's, as the factory was given it.
        rank: this process's index in the group, 0 to ``size - 1``: where the factory's ``ranks`` names it.
        size: how many ranks the group has, at least 2.
        capabilities: see ``CommunicatorCapabilities``.
    """

    name: str
    rank: int
    size: int
    capabilities: CommunicatorCapabilities

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, the same bits on each, as each samples by itself. ``tensor`` is donated, and may be the
        result."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors (equal shapes) joined along ``dim``, in the group's order."""

    @abstractmethod
    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The sum over the ranks, of which each keeps its part of ``dim`` (divisible by ``size``)."""

    @abstractmethod
    def all_to_all(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Rows for each rank: ``send[r]`` rows of ``tensor`` go to index r of the group, ``receive[r]`` come from it;
        both have ``size`` entries, 0 allowed, this rank's own among them. Returns [sum(receive), …], in the group's
        order."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """The tensor of index ``source`` of the group, on every rank. ``tensor`` is donated, and may be the result."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Send to index ``target`` of the group, not this rank's own; returns when ``tensor`` may be reused."""

    def post(self, tensor: torch.Tensor, target: int) -> Callable[[], object]:
        """(optional) As ``send``, but does not wait for the other rank. ``tensor`` must not change until the function
        that is returned, which waits, has been called. Default: ``send``."""
        self.send(tensor, target)
        return lambda: None

    @abstractmethod
    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Receive into ``tensor`` (donated, and returned) from index ``source`` of the group, not this rank's own."""

    def expect(self, tensor: torch.Tensor, source: int) -> Callable[[], torch.Tensor]:
        """(optional) As ``receive``, but returns at once, so that nobody who sends waits for what this rank does before
        it needs the tensor. The function that is returned gives it when it is there; call it once, in the order of the
        calls of this. Default: it is ``receive``, for groups in which a message lies somewhere until it is taken."""
        return lambda: self.receive(tensor, source)

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank is here."""

    def close(self) -> None:
        """(optional) Leave the group. Default: nothing."""
        return


class CommunicatorFactory(Protocol):
    """Opens this process's end of a group. Only the group's ranks call it; for groups of the same ranks in the same
    order. ``evener.distributed.torch_communicator.open_torch_communicator(library, …)`` takes the same arguments behind
    the name of a library of ``torch.distributed``."""

    def __call__(
        self, name: str, ranks: Sequence[int], rank: int, world_size: int, init_method: str
    ) -> Communicator:
        """This process's end of group ``name``.

        Args:
            ranks: the group's ranks in the world, ascending, each once; ``ranks[i]`` is index i of the group.
            rank: this process's rank in the world; one of ``ranks``.
            world_size: ranks of the world.
            init_method: where they all meet, as ``torch.distributed.init_process_group`` takes it.
        """
