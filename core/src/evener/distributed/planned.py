"""A communicator for a rank that is planned and never runs: ``evener explain`` declares rank 0's part with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from evener.contracts.communicator import Communicator, CommunicatorCapabilities
from evener.errors import EngineError

if TYPE_CHECKING:
    import torch


class Planned(Communicator):
    """Rank 0 of ``size`` ranks, of which none is there: every call is an error."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.rank, self.size = name, 0, size
        self.capabilities = CommunicatorCapabilities(capturable=True)

    def _absent(self, *_: Any) -> NoReturn:
        raise EngineError(f"group {self.name!r} of {self.size} ranks is planned; start them to run a step")

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._absent(tensor)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self._absent(tensor, dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        self._absent(tensor, dim)

    def all_to_all(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        self._absent(tensor, send, receive)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        self._absent(tensor, source)

    def send(self, tensor: torch.Tensor, target: int) -> None:
        self._absent(tensor, target)

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        self._absent(tensor, source)

    def barrier(self) -> None:
        self._absent()
