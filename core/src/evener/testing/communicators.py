"""Communicators without processes: ranks as threads of one process, each on a device of its own or all on one, and a
rank whose peers do as it does."""

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
_ALL = CommunicatorCapabilities(frozenset({"float32", "bfloat16", "float16", "int32", "int64"}), capturable=False)


@dataclass
class _Room:
    """Where the threads of one group meet. ``posts``: what each rank has brought; ``gone``: one of them has left."""

    size: int
    timeout: float | None
    gone: bool = False
    mail: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=self.timeout)
        self.arrived = threading.Condition()
        self.posts: list[Any] = [None] * self.size


class ThreadCommunicator(Communicator):
    """One rank of a group of threads; make all of them with ``thread_group``. Sums go in rank order, so every rank has
    the same bits. A rank that stays away, or ``abort``, is an ``EngineError`` for the others."""

    def __init__(self, name: str, rank: int, room: _Room) -> None:
        self.name, self.rank, self.size, self.capabilities = name, rank, room.size, _ALL
        self._room = room

    def _exchange(self, post: Any, where: torch.device) -> list[Any]:
        """What every rank brought, on the device ``where``. Nobody goes on before all have read it, so posts may be
        written afterwards."""
        _settle(where)
        self._room.posts[self.rank] = post
        self.barrier()
        found = [tree_map_only(torch.Tensor, lambda tensor: tensor.to(where), each) for each in self._room.posts]
        _settle(where)
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
            raise EngineError(f"all_to_all: rank {self.rank} was sent other numbers of rows than {list(receive)}")
        return torch.cat(mine)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        found: torch.Tensor = self._exchange(tensor.clone(), tensor.device)[source]
        return tensor.copy_(found)

    def send(self, tensor: torch.Tensor, target: int) -> None:
        letter = tensor.clone()
        _settle(tensor.device)
        with self._room.arrived:
            self._room.mail.setdefault((self.rank, target), []).append(letter)
            self._room.arrived.notify_all()

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        room, box = self._room, (source, self.rank)
        with room.arrived:
            if not room.arrived.wait_for(lambda: room.gone or bool(room.mail.get(box)), room.timeout):
                raise EngineError(f"rank {source} of group {self.name!r} sent nothing to rank {self.rank}")
            if not room.mail.get(box):
                raise self._gone() from threading.BrokenBarrierError()
            letter = room.mail[box].pop(0)
        tensor.copy_(letter)
        _settle(tensor.device)
        return tensor

    def barrier(self) -> None:
        try:
            self._room.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise self._gone() from error

    def _gone(self) -> EngineError:
        return EngineError(f"a rank of group {self.name!r} is gone")

    def abort(self) -> None:
        """Let nobody wait for this rank any longer."""
        self._room.barrier.abort()
        with self._room.arrived:
            self._room.gone = True
            self._room.arrived.notify_all()


def _settle(device: torch.device) -> None:
    """Wait for ``device``: what a thread has submitted to one, another thread's copy from another does not wait for."""
    torch.get_device_module(device).synchronize(device.index)


def thread_group(name: str, size: int, timeout: float | None = 60.0) -> list[ThreadCommunicator]:
    """The ends of a group of ``size`` threads, which wait ``timeout`` seconds for one another; None: for ever."""
    room = _Room(size, timeout)
    return [ThreadCommunicator(name, rank, room) for rank in range(size)]


def on_threads(size: int, work: Callable[[ThreadCommunicator], T], name: str = "tp") -> list[T]:
    """What ``work`` returns on each rank of a group of threads.

    Raises:
        BaseException: the first rank's that failed by itself, not for want of another.
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


class Mirror(Communicator):
    """A rank whose peers have what it has: sums are ``size`` times its tensor."""

    def __init__(self, size: int, rank: int = 0, capturable: bool = False) -> None:
        self.name, self.rank, self.size = "mirror", rank, size
        self.capabilities = CommunicatorCapabilities(_ALL.dtypes, capturable=capturable)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mirror) and (other.size, other.rank) == (self.size, self.rank)

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
