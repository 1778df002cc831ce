"""The default communicator: ``torch.distributed``, with the backend string that the device's package names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from evener.contracts.communicator import Communicator, CommunicatorCapabilities
from evener.errors import EngineError


class TorchCommunicator(Communicator):
    """A group of ranks over a process group of ``torch.distributed``.

    Args:
        name: of the group, in messages: "tp", "pp", "ep", …
        group: an initialised process group that includes this rank.
        capabilities: which dtypes its library can sum.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, capabilities: CommunicatorCapabilities) -> None:
        self.name, self._group, self.capabilities = name, group, capabilities
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        known = str(tensor.dtype).removeprefix("torch.") in self.capabilities.dtypes
        if not (known or tensor.is_floating_point()):
            raise EngineError(
                f"all_reduce in group {self.name!r}: its library sums {', '.join(sorted(self.capabilities.dtypes))}, "
                f"not {tensor.dtype}; convert it, or declare the type in CommunicatorCapabilities.dtypes"
            )
        summed = (tensor if known else tensor.float()).contiguous()
        dist.all_reduce(summed, group=self._group)
        return summed if known else tensor.copy_(summed)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        mine = tensor.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather([_bytes(p) for p in parts], _bytes(mine), group=self._group)
        return torch.cat(parts, dim=dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        if tensor.shape[dim] % self.size:
            raise EngineError(
                f"reduce_scatter: dimension {dim} of size {tensor.shape[dim]} is not divisible by {self.size} ranks"
            )
        # Gloo has no reduce-scatter. Summing on all ranks and keeping one part works with every library.
        return self.all_reduce(tensor).chunk(self.size, dim)[self.rank].contiguous()

    def all_to_all(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        if len(send) != self.size or len(receive) != self.size:
            raise EngineError(
                f"all_to_all in group {self.name!r} of {self.size} ranks: {len(send)} send and {len(receive)} receive "
                "splits; give one for each rank"
            )
        if sum(send) != len(tensor):
            raise EngineError(
                f"all_to_all in group {self.name!r}: the splits send {sum(send)} rows, but the tensor has {len(tensor)}"
            )
        out = tensor.new_empty(sum(receive), *tensor.shape[1:])
        sent = dict(enumerate(tensor.split(list(send))))
        got = dict(enumerate(out.split(list(receive))))
        got[self.rank].copy_(sent[self.rank])
        # All ranks go through the pairs in the same order, and the lower rank sends first: so no ranks deadlock.
        for low, high in itertools.combinations(range(self.size), 2):
            if self.rank == low:
                self.send(sent[high], high)
                self.receive(got[high], high)
            elif self.rank == high:
                self.receive(got[low], low)
                self.send(sent[low], low)
        return out

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        tensor = tensor.contiguous()
        dist.broadcast(_bytes(tensor), group=self._group, group_src=source)
        return tensor

    def send(self, tensor: torch.Tensor, target: int) -> None:
        if tensor.numel():
            dist.send(_bytes(tensor.contiguous()), group=self._group, group_dst=target)

    def isend(self, tensor: torch.Tensor, target: int) -> Callable[[], object]:
        sent = tensor.contiguous()
        work = dist.isend(_bytes(sent), group=self._group, group_dst=target) if sent.numel() else None
        # The function refers to ``sent``, which keeps its memory alive until the send is done.
        return lambda: work is None or sent.numel() == 0 or work.wait()

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return self.irecv(tensor, source)()

    def irecv(self, tensor: torch.Tensor, source: int) -> Callable[[], torch.Tensor]:
        whole = tensor.contiguous()
        work = dist.irecv(_bytes(whole), group=self._group, group_src=source) if whole.numel() else None

        def arrived() -> torch.Tensor:
            if work is not None:
                work.wait()
            return whole if whole is tensor else tensor.copy_(whole)

        return arrived

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def close(self) -> None:
        dist.destroy_process_group(self._group)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the tensor as bytes: every library can send these, whatever the dtype."""
    return tensor.view(-1).view(torch.uint8)


def open_torch_communicator(
    library: str, name: str, ranks: Sequence[int], rank: int, world_size: int, init_method: str,
    capabilities: CommunicatorCapabilities | None = None,
) -> TorchCommunicator:  # fmt: skip
    """Open this rank's end of group ``name``. All ranks of the group must call it, and must open several groups in the
    same order.

    Args:
        library: the backend string of ``torch.distributed``: "gloo", or that of the vendor's library.
        ranks: the ranks of the group, in ascending order.
        rank, world_size: this process's rank among all.
        init_method: where the ranks find each other, see ``torch.distributed.init_process_group``.
        capabilities: which dtypes the library can sum; default: the conservative ones.

    Raises:
        EngineError: this rank is not in ``ranks``, or they are not sorted (``torch.distributed`` would sort them).
    """
    if list(ranks) != sorted(set(ranks)):
        raise EngineError(
            f"group {name!r} was asked for with the ranks {list(ranks)}; list each once, the lowest first"
        )
    if rank not in ranks:
        raise EngineError(f"rank {rank} opened group {name!r}, which has the ranks {list(ranks)}")
    if not dist.is_initialized():
        dist.init_process_group(library, init_method=init_method, rank=rank, world_size=world_size)
    group = dist.new_group(list(ranks), backend=library, use_local_synchronization=True)
    return TorchCommunicator(name, group, capabilities or CommunicatorCapabilities())
