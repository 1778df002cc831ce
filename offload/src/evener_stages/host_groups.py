"""Groups of ranks on unlike devices: what they send goes through host memory, which all of them have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from evener.contracts.communicator import Communicator, CommunicatorFactory
from evener.contracts.device import Device
from evener.distributed.communicators import open_host_group
from evener.distributed.world import RankGroups, RankPlacement


class HostGroup(Communicator):
    """A group that takes tensors in host memory, as one that takes those of ``device`` too.

    ``isend`` waits until its tensor is computed, but not for the receiver.
    """

    def __init__(self, inner: Communicator, device: Device) -> None:
        self.inner, self._device = inner, device
        self.name, self.rank, self.size, self.capabilities = inner.name, inner.rank, inner.size, inner.capabilities

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.inner.all_reduce(self._host(tensor)).to(tensor.device)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self.inner.all_gather(self._host(tensor), dim).to(tensor.device)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return self.inner.reduce_scatter(self._host(tensor), dim).to(tensor.device)

    def all_to_all(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        return self.inner.all_to_all(self._host(tensor), send, receive).to(tensor.device)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return self.inner.broadcast(self._host(tensor), source).to(tensor.device)

    def send(self, tensor: torch.Tensor, target: int) -> None:
        self.inner.send(self._host(tensor), target)

    def isend(self, tensor: torch.Tensor, target: int) -> Callable[[], object]:
        return self.inner.isend(self._host(tensor), target)

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return self.inner.receive(tensor, source)
        return tensor.copy_(self.inner.receive(torch.empty_like(tensor, device="cpu"), source))

    def irecv(self, tensor: torch.Tensor, source: int) -> Callable[[], torch.Tensor]:
        if tensor.device.type == "cpu":
            return self.inner.irecv(tensor, source)
        wait = self.inner.irecv(torch.empty_like(tensor, device="cpu"), source)
        return lambda: tensor.copy_(wait())

    def barrier(self) -> None:
        self.inner.barrier()

    def close(self) -> None:
        self.inner.close()

    def _host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device.type == "cpu" else self._device.readback(tensor).wait()


def open_groups(place: RankGroups | RankPlacement, factory: CommunicatorFactory, device: Device) -> RankGroups:
    """The groups of a rank; those of several stages take tensors of ``device``, and send them through host memory.

    Args:
        place: groups that are open, whose stages take tensors in host memory; or where to open them.
        factory: opens the group of ranks that share layers, which have devices of one backend.
    """
    groups = place if isinstance(place, RankGroups) else _opened(place, factory)
    pp, ids = (each if each is None or isinstance(each, HostGroup) else HostGroup(each, device)
               for each in (groups.pp, groups.ids))  # fmt: skip
    return replace(groups, pp=pp, ids=ids)


def _opened(place: RankPlacement, factory: CommunicatorFactory) -> RankGroups:
    world = place.world
    # The first group decides about the library that all ranks share, so it is one that all of them have.
    groups = {"pp": (world.pp_ranks, open_host_group), "ids": (world.pp_ranks, open_host_group),
              "tp": (world.tp_ranks, factory)}  # fmt: skip
    opened = {name: opens(name, ranks, world.rank, world.size, place.init_method)
              for name, (ranks, opens) in groups.items() if len(ranks) > 1}  # fmt: skip
    return RankGroups(world, device=place.device, local_size=place.local_size, **opened)
