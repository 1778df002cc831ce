"""How ranks on GPUs talk: NCCL, and for small sums a kernel that reads the peers' memory over NVLink."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from evener.contracts.communicator import Communicator, CommunicatorCapabilities
from evener.distributed.torch_communicator import TorchCommunicator, open_torch_communicator

log = logging.getLogger("evener.cuda")
_REDUCES = CommunicatorCapabilities(
    dtypes=frozenset({"float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64"}), capturable=True
)
#: Bytes up to which one kernel is faster than NCCL, by the number of ranks; others use NCCL alone. With these numbers
#: torch's kernel adds in rank order, so all ranks have the same bits.
SMALL = {2: 1 << 16, 4: 1 << 16, 8: 1 << 16}
_TYPES = (torch.float32, torch.bfloat16)
#: What the kernel moves at a time.
_VECTOR = 16


class PeerCommunicator(TorchCommunicator):
    """Sums of up to ``limit`` bytes in one launch: every rank copies its tensor into memory that all can read, and adds
    up everybody's (torch's symmetric memory; no NVLink multicast). All else is NCCL's.

    Args:
        base: the group, opened; its ranks can read each other's memory.
    """

    def __init__(self, base: TorchCommunicator, limit: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        super().__init__(base.name, base._group, base.capabilities)
        self._limit, self._group_name = limit, base._group.group_name
        where = torch.device("cuda", torch.cuda.current_device())
        self._shared = symmetric.empty(limit, dtype=torch.uint8, device=where)
        self._handle = symmetric.rendezvous(self._shared, self._group_name)
        ops: Any = torch.ops.symm_mem
        self._sum = ops.one_shot_all_reduce_copy

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        nbytes = tensor.nbytes
        if not 0 < nbytes <= self._limit or nbytes % _VECTOR or tensor.dtype not in _TYPES:
            return super().all_reduce(tensor)
        own = self._shared[:nbytes].view(tensor.dtype).view(tensor.shape)
        found: torch.Tensor = self._sum(own, tensor.contiguous(), "sum", self._group_name)
        return found


def open_communicator(
    name: str, ranks: Sequence[int], rank: int, world_size: int, init_method: str
) -> Communicator:  # fmt: skip
    """This rank's end of a group. Ranks that share layers ("tp") use each other's memory where they can."""
    base = open_torch_communicator("nccl", name, ranks, rank, world_size, init_method, _REDUCES)
    if name != "tp" or base.size not in SMALL or not _reachable(base):
        return base
    log.info("ranks %s add up to %d KiB over NVLink themselves", list(ranks), SMALL[base.size] >> 10)
    return PeerCommunicator(base, SMALL[base.size])


def _reachable(base: TorchCommunicator) -> bool:
    """Whether all ranks are on this machine, on GPUs that read each other's memory; all ranks answer alike."""
    mine = torch.cuda.current_device()
    boot = zlib.crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    places = base.all_gather(torch.tensor([[boot, mine]], device="cuda"), dim=0).tolist()
    others = [index for machine, index in places if machine == boot and index != mine]
    near = len(others) == base.size - 1 and max(others) < torch.cuda.device_count()
    able = near and all(torch.cuda.can_device_access_peer(mine, other) for other in others)
    return all(flag for [flag] in base.all_gather(torch.tensor([[int(able)]], device="cuda"), dim=0).tolist())
