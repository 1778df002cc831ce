"""A communicator for a single rank that simulates its peers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evener.contracts.communicator import Communicator, CommunicatorCapabilities

_DTYPES = frozenset({"float32", "bfloat16", "float16", "int32", "int64"})


class MirrorCommunicator(Communicator):
    """A rank that simulates peers with the same tensors as its own: a sum is ``size`` times its tensor."""

    def __init__(self, size: int, rank: int = 0, capturable: bool = False) -> None:
        self.name, self.rank, self.size = "mirror", rank, size
        self.capabilities = CommunicatorCapabilities(_DTYPES, capturable=capturable)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MirrorCommunicator) and (other.size, other.rank) == (self.size, self.rank)

    def __hash__(self) -> int:
        return hash((self.size, self.rank))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mul_(self.size)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat([tensor] * self.size, dim=dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return (tensor * self.size).chunk(self.size, dim)[self.rank].contiguous()

    def all_to_all(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        return torch.cat([tensor.split(list(send))[self.rank]] * self.size)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return tensor

    def send(self, tensor: torch.Tensor, target: int) -> None:
        return

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return tensor

    def barrier(self) -> None:
        return
