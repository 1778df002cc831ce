"""The communicator: NCCL, and for small all-reduces one kernel that reads the peers' memory over NVLink."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch

from evener.backend.torch_communicator import TorchCommunicator, open_torch_communicator
from evener.contracts.communicator import Communicator
from evener_backend_cuda.peer_kernel import peer_sum_kernel
from evener_backend_parts.gpu import NCCL_CAPABILITIES, connect_pairs

log = logging.getLogger("evener.cuda")
#: Number of ranks → bytes up to which one launch is faster than NCCL; other numbers of ranks use NCCL alone. Measured
#: for 2 ranks; the limit of 4 ranks is lower, so that a rank does not read more.
PEER_SUM_MAX_BYTES = {2: 1 << 22, 4: 1 << 18}
_TYPES = (torch.float32, torch.bfloat16)
#: Blocks of a launch, at most: all run at the same time on every GPU that has NVLink; and the least bytes of a block.
_BLOCKS, _MIN_BLOCK_BYTES = 128, 2048
_VECTOR, _TILE = 16, 1 << 15


class PeerCommunicator(TorchCommunicator):
    """All-reduces up to ``limit`` bytes in one launch, through memory that all ranks can read (torch's symmetric
    memory; no NVLink multicast). NCCL does everything else.

    Args:
        base: the open group, whose ranks can read each other's memory.
        limit: bytes; a multiple of what all blocks of a launch move at a time.
    """

    def __init__(self, base: TorchCommunicator, limit: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        super().__init__(base.name, base._group, base.capabilities)
        where = torch.device("cuda", torch.cuda.current_device())
        self._limit, self._region, flags = limit, limit // _BLOCKS, _BLOCKS * base.size * 4
        self._flags = -(-flags // 4096) * 4096
        self._shared = symmetric.empty(self._flags + 2 * limit, dtype=torch.uint8, device=where)
        self._handle = symmetric.rendezvous(self._shared, base._group.group_name)
        self._peers = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=where)
        self._rounds = torch.zeros(_BLOCKS, dtype=torch.int32, device=where)
        self._shared.zero_()
        torch.cuda.synchronize()
        self.barrier()  # no rank may signal a peer before the peer's flags are clear

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        nbytes = tensor.nbytes
        if not 0 < nbytes <= self._limit or nbytes % _VECTOR or tensor.dtype not in _TYPES:
            return super().all_reduce(tensor)
        tensor, size = tensor.contiguous(), tensor.element_size()
        blocks = min(_BLOCKS, -(-nbytes // _MIN_BLOCK_BYTES))
        each = -(-nbytes // (blocks * _VECTOR)) * _VECTOR
        tile = min(_TILE, 1 << (each - 1).bit_length())
        peer_sum_kernel[(blocks,)](
            tensor, self._peers, self._rounds, nbytes // size, each // size, RANK=self.rank, RANKS=self.size,
            BLOCKS=_BLOCKS, REGION=self._region // size, DATA=self._flags, TILE=tile // size,
            num_warps=max(1, min(16, tile // (32 * _VECTOR))),
        )  # fmt: skip
        return tensor


def open_communicator(name: str, ranks: Sequence[int], rank: int, world_size: int, init_method: str) -> Communicator:
    """This rank's communicator of a group. Tensor parallel ranks ("tp") read each other's memory if they can."""
    base = open_torch_communicator("nccl", name, ranks, rank, world_size, init_method, NCCL_CAPABILITIES)
    if name != "tp":
        connect_pairs(base, torch.device("cuda"))
    if name != "tp" or base.size not in PEER_SUM_MAX_BYTES or not _can_access_peers(base):
        return base
    log.info(
        "ranks %s all-reduce up to %d KiB over NVLink without NCCL", list(ranks), PEER_SUM_MAX_BYTES[base.size] >> 10
    )
    return PeerCommunicator(base, PEER_SUM_MAX_BYTES[base.size])


def _can_access_peers(base: TorchCommunicator) -> bool:
    """Whether all ranks are on this machine, on GPUs that can read each other's memory; every rank gets the same
    answer."""
    mine = torch.cuda.current_device()
    boot = zlib.crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    places = base.all_gather(torch.tensor([[boot, mine]], device="cuda"), dim=0).tolist()
    others = [index for machine, index in places if machine == boot and index != mine]
    near = len(others) == base.size - 1 and max(others) < torch.cuda.device_count()
    able = near and all(torch.cuda.can_device_access_peer(mine, other) for other in others)
    return all(flag for [flag] in base.all_gather(torch.tensor([[int(able)]], device="cuda"), dim=0).tolist())
