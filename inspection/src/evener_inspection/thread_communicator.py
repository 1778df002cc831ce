"""The communicator of ranks that are threads of one process, on one device or on several."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from evener.contracts.communicator import Communicator, CommunicatorCapabilities
from evener.errors import EngineError

T = TypeVar("T")
_CAPABILITIES = CommunicatorCapabilities(
    frozenset({"float32", "bfloat16", "float16", "int32", "int64"}), capturable=False
)


@dataclass
class _ThreadGroup:
    """The data that the threads of a group share. ``contributions``: each rank's part of the current collective;
    ``gone``: whether a rank has failed."""

    size: int
    timeout: float | None
    gone: bool = False
    mailboxes: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=self.timeout)
        self.arrived = threading.Condition()
        self.contributions: list[Any] = [None] * self.size


class ThreadCommunicator(Communicator):
    """One rank of a group of threads; ``thread_group`` makes all of them. Sums are computed in rank order, so all ranks
    get the same bits. If a rank does not arrive in time or calls ``abort``, the others raise ``EngineError``."""

    def __init__(self, name: str, rank: int, shared: _ThreadGroup) -> None:
        self.name, self.rank, self.size, self.capabilities = name, rank, shared.size, _CAPABILITIES
        self._shared = shared

    def _exchange(self, own: Any, where: torch.device) -> list[Any]:
        """The contributions of all ranks, copied to the device ``where``. Returns only when all ranks have copied them,
        so a contribution may be overwritten afterwards."""
        _synchronize(where)
        self._shared.contributions[self.rank] = own
        self.barrier()
        contributions = self._shared.contributions
        found = [tree_map_only(torch.Tensor, lambda tensor: tensor.to(where), each) for each in contributions]
        _synchronize(where)
        self.barrier()
        return found

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = self._exchange(tensor.clone(), tensor.device)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return tensor.copy_(total)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._exchange(tensor.clone(), tensor.device), dim=dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        if tensor.shape[dim] % self.size:
            raise EngineError(
                f"reduce_scatter: dimension {dim} of size {tensor.shape[dim]} is not divisible by {self.size} ranks"
            )
        return self.all_reduce(tensor.clone()).chunk(self.size, dim)[self.rank].contiguous()

    def all_to_all(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        pieces = self._exchange([piece.clone() for piece in tensor.split(list(send))], tensor.device)
        mine = [rows[self.rank] for rows in pieces]
        if [len(rows) for rows in mine] != list(receive):
            raise EngineError(
                f"all_to_all: rank {self.rank} expects {list(receive)} rows, but others sent another number"
            )
        return torch.cat(mine)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        found: torch.Tensor = self._exchange(tensor.clone(), tensor.device)[source]
        return tensor.copy_(found)

    def send(self, tensor: torch.Tensor, target: int) -> None:
        message = tensor.clone()
        _synchronize(tensor.device)
        with self._shared.arrived:
            self._shared.mailboxes.setdefault((self.rank, target), []).append(message)
            self._shared.arrived.notify_all()

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        shared, mailbox = self._shared, (source, self.rank)
        with shared.arrived:
            if not shared.arrived.wait_for(lambda: shared.gone or bool(shared.mailboxes.get(mailbox)), shared.timeout):
                raise EngineError(
                    f"rank {source} of group {self.name!r} sent nothing to rank {self.rank} in {shared.timeout} s"
                )
            if not shared.mailboxes.get(mailbox):
                raise self._peer_lost_error() from threading.BrokenBarrierError()
            message = shared.mailboxes[mailbox].pop(0)
        tensor.copy_(message)
        _synchronize(tensor.device)
        return tensor

    def barrier(self) -> None:
        try:
            self._shared.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise self._peer_lost_error() from error

    def _peer_lost_error(self) -> EngineError:
        return EngineError(f"a rank of group {self.name!r} has failed; its own error says why")

    def abort(self) -> None:
        """Let the calls of the other ranks fail, instead of waiting for this rank."""
        self._shared.barrier.abort()
        with self._shared.arrived:
            self._shared.gone = True
            self._shared.arrived.notify_all()


def _synchronize(device: torch.device) -> None:
    """Wait until all work on ``device`` is done. A copy that another thread starts does not wait for it by itself."""
    torch.get_device_module(device).synchronize(device.index)


def thread_group(name: str, size: int, timeout: float | None = 60.0) -> list[ThreadCommunicator]:
    """The communicators of a group of ``size`` threads, by rank. Each waits at most ``timeout`` seconds for the others;
    None waits without limit."""
    shared = _ThreadGroup(size, timeout)
    return [ThreadCommunicator(name, rank, shared) for rank in range(size)]


def run_on_threads(size: int, work: Callable[[ThreadCommunicator], T], name: str = "tp") -> list[T]:
    """Run ``work`` on each rank of a group of threads. Returns the results by rank.

    Raises:
        BaseException: the error of the first rank that failed by itself, not because another had failed.
    """
    group = thread_group(name, size)

    def one(communicator: ThreadCommunicator) -> T:
        try:
            return work(communicator)
        except BaseException:
            communicator.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, communicator) for communicator in group]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda e: isinstance(e.__cause__, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
