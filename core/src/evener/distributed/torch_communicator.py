"""The default communicator: ``torch.distributed`` with a backend string that the device's package names."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from evener.contracts.communicator import Communicator, CommunicatorCapabilities
from evener.errors import EngineError


class TorchCommunicator(Communicator):
    """One group of ranks over a process group.

    Args:
        name: "tp", "pp", "ep", …
        group: an initialised process group that this rank belongs to.
        capabilities: what its library reduces.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, capabilities: CommunicatorCapabilities) -> None:
        self.name, self._group, self.capabilities = name, group, capabilities
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return torch.cat(parts, dim=dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        if tensor.shape[dim] % self.size:
            raise EngineError(
                f"reduce_scatter: dimension {dim} of size {tensor.shape[dim]} is not divisible by {self.size} ranks"
            )
        # Gloo has no reduce-scatter; summing everywhere and keeping a part is right with every library.
        return self.all_reduce(tensor).chunk(self.size, dim)[self.rank].contiguous()

    def all_to_all(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        out = tensor.new_empty(sum(receive), *tensor.shape[1:])
        sent = dict(enumerate(tensor.split(list(send))))
        got = dict(enumerate(out.split(list(receive))))
        got[self.rank].copy_(sent[self.rank])
        # Pairs meet in rounds, the lower rank sending first, so that no two ranks wait for each other.
        for low, high in itertools.combinations(range(self.size), 2):
            if self.rank == low:
                self.send(sent[high], high)
                self.receive(got[high], high)
            elif self.rank == high:
                self.receive(got[low], low)
                self.send(sent[low], low)
        return out

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        dist.broadcast(tensor, group=self._group, group_src=source)
        return tensor

    def send(self, tensor: torch.Tensor, target: int) -> None:
        if tensor.numel():
            dist.send(tensor.contiguous(), group=self._group, group_dst=target)

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        if tensor.numel():
            dist.recv(tensor, group=self._group, group_src=source)
        return tensor

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def close(self) -> None:
        dist.destroy_process_group(self._group)


def open_torch_communicator(
    library: str, name: str, ranks: Sequence[int], rank: int, world_size: int, init_method: str,
    capabilities: CommunicatorCapabilities | None = None,
) -> TorchCommunicator:  # fmt: skip
    """This rank's end of group ``name``; every rank of the world calls it for every group, in the same order.

    Args:
        library: the backend string of ``torch.distributed`` ("gloo", or the vendor's).

    Raises:
        EngineError: this rank is not in ``ranks``.
    """
    if not dist.is_initialized():
        dist.init_process_group(library, init_method=init_method, rank=rank, world_size=world_size)
    group = dist.new_group(list(ranks), backend=library)
    if rank not in ranks:
        raise EngineError(f"rank {rank} opened group {name!r}, which has the ranks {list(ranks)}")
    return TorchCommunicator(name, group, capabilities or CommunicatorCapabilities())
