"""The communicator contract: how the ranks of one group talk. Passed to layers, never global; one rank has none."""

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
        host_splits: all-to-all wants split sizes on the host.
    """

    dtypes: frozenset[str] = frozenset({"float32"})
    capturable: bool = False
    host_splits: bool = True


class Communicator(ABC):
    """One named group of ranks ("tp", "pp", "ep"). Every rank calls the same methods in the same order."""

    name: str
    rank: int
    size: int
    capabilities: CommunicatorCapabilities

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks. ``tensor`` is donated."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors (equal shapes) joined along ``dim``, in rank order."""

    @abstractmethod
    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The sum over the ranks, of which each keeps its part of ``dim`` (divisible by ``size``)."""

    @abstractmethod
    def all_to_all(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Rows for each rank: ``send[r]`` rows go to rank r, ``receive[r]`` come from it. Returns [sum(receive), …]."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Rank ``source``'s tensor, on every rank. ``tensor`` is donated."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Send to another rank of the group; returns when ``tensor`` may be reused."""

    def post(self, tensor: torch.Tensor, target: int) -> Callable[[], bool]:
        """(optional) As ``send``, but does not wait for the other rank. ``tensor`` must not change until the function
        that is returned says True. Default: ``send``."""
        self.send(tensor, target)
        return lambda: True

    @abstractmethod
    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Receive into ``tensor`` (donated) from another rank of the group."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank is here."""

    def close(self) -> None:
        """(optional) Leave the group. Default: nothing."""
        return


class CommunicatorFactory(Protocol):
    """Opens this rank's end of a group; ``init_method`` as ``torch.distributed`` takes it. Only the group's ranks call
    it; for groups of the same ranks in the same order."""

    def __call__(
        self, name: str, ranks: Sequence[int], rank: int, world_size: int, init_method: str
    ) -> Communicator: ...
