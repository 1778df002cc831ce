"""The workers' half: host memory for blocks, and copies to and from it.

On a device with streams, copies run beside the steps. Blocks that leave are gathered to a small buffer by the step's
own queue, before anything writes to them; one stream copies buffers to the host, another copies blocks back. The host's
side of both is page-locked. The step's queue waits for a stream only where it has to: for a buffer that is still being
copied from, and for the transfers that a plan says. On other devices, the host among them, a copy is made at once.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from evener.contracts.connector import BlockMove, BlockMover, BlockMoves, BlockTransfer
from evener.contracts.device import Device
from evener.engine.worker.assembly import Assembly
from evener.errors import ConfigError
from evener_kv.block_bytes import BlockBytes, block_bytes
from evener_kv.files.rank_files import RankFiles
from evener_offload.host_backend import host_memory

#: Bytes of a buffer on the device, and of a piece of host memory: a power of two, to which torch rounds page-locked
#: memory. Both are larger if one block, or one slab, is.
_BUFFER, _PIECE = 16 << 20, 256 << 20


class HostMemory(BlockMover):
    """Copies blocks of ``groups`` to and from ``nbytes`` bytes of host memory.

    Args:
        spans: pages of a block of each group; ``pages``: of a slab. A place is the number of a page; those of the first
            slab do not exist.

    Attributes:
        files: copies blocks from here to files and back; None: there are none.
    """

    files: RankFiles | None = None

    def __init__(
        self, device: Device, groups: Sequence[BlockBytes], spans: Sequence[int], pages: int, nbytes: int
    ) -> None:
        self._device, self._groups, self._spans, self._pages = device, groups, spans, pages
        page = max(-(-group.nbytes // span) for group, span in zip(groups, spans, strict=True))
        self._page_bytes = -(-page // 64) * 64
        slab = self._page_bytes * pages
        self.slabs, self._each = nbytes // slab if slab else 0, max(1, _PIECE // max(1, slab))
        if not self.slabs:
            raise ConfigError(f"infer.kv_host_memory={nbytes} does not hold one block of all layers, which takes "
                              f"{slab} bytes; set more")  # fmt: skip
        lengths = [min(self._each, self.slabs - at) * slab for at in range(0, self.slabs, self._each)]
        self._memory = [self._piece(length) for length in lengths]
        self._streams = _streams(device)
        buffer = max(_BUFFER, *(group.nbytes for group in groups)) if self._streams else 0
        #: Two for blocks that leave, in turn, and one for blocks that come.
        self._buffers = [torch.empty(buffer, dtype=torch.uint8, device=device.torch_device) for _ in range(3)]
        self._copied: list[Any] = [None, None]
        self._turn = 0
        #: Places that are being written, the oldest first; and the transfers that no plan has waited for, with the
        #: places that they read. Each is an event, None without streams.
        self._writing: deque[tuple[Any, frozenset[int]]] = deque()
        self._transfers: dict[int, tuple[Any, frozenset[int]]] = {}
        self._reported: set[int] = set()
        #: For the thread of files: copies to the device that may read places; how many moves were begun; and the lock
        #: of all that it looks at.
        self._reading: deque[tuple[Any, frozenset[int]]] = deque()
        self._begun, self._lock = 0, threading.Condition()
        self._counters = {"kv_host_stored_bytes": 0, "kv_host_loaded_bytes": 0}

    @classmethod
    def of(cls, assembly: Assembly, storage: torch.Tensor) -> HostMemory:
        """As ``infer.kv_host_memory`` says; ``storage`` is what ``Geometry.bind`` returned.

        Raises:
            ConfigError: the host has less, or it does not hold one slab.
        """
        asked, ranks = assembly.config.config.infer.kv_host_memory, assembly.ranks.world.size
        free, total = host_memory().free, host_memory().total
        nbytes = int(free * asked) // ranks if isinstance(asked, float) else asked or 0
        if nbytes > free:
            raise ConfigError(f"infer.kv_host_memory={nbytes} is more than the host has free, {free} bytes; set less")
        # Free memory changes while the ranks of a machine start, but together they cannot have more than all.
        if nbytes * (local := assembly.ranks.local_size) > total:
            raise ConfigError(f"infer.kv_host_memory={nbytes} for each of {local} ranks is more than the host has, "
                              f"{total} bytes; set less")  # fmt: skip
        geometry, device = assembly.geometry, assembly.device
        pages = math.lcm(*(group.cut for group in geometry.groups))
        made = cls(device, block_bytes(geometry, storage, device), geometry.spans, pages, nbytes)
        size = f"{made.slabs} slabs, {made.slabs * made.slab_bytes} bytes"
        assembly.resolver.manifest.notes.append(f"blocks that leave the prefix cache go to host memory: {size}")
        return made

    @property
    def slab_bytes(self) -> int:
        """Bytes of one slab in host memory."""
        return self._page_bytes * self._pages

    def counters(self) -> Mapping[str, int]:
        return self._counters

    def close(self) -> None:
        if self.files is not None:
            self.files.close()

    def settled(self, places: Sequence[int], after: int, timeout: float) -> bool:
        """As ``evener_kv.files.rank_files.Places``; for another thread."""
        until, wanted = time.monotonic() + timeout, frozenset(places)
        while (left := until - time.monotonic()) > 0:
            with self._lock:
                if not self._lock.wait_for(lambda: self._begun >= after, left):
                    return False
                copies = [*self._writing, *self._reading]
                if all(event.query() for event, used in copies if not wanted.isdisjoint(used)):
                    return True
            time.sleep(0.001)
        return False

    def bytes_at(self, place: int, group: int) -> memoryview:
        """As ``evener_kv.files.rank_files.Places``; for another thread."""
        return memoryview(self._place(place, self._groups[group].nbytes).numpy())

    @property
    def sizes(self) -> list[int]:
        """Bytes of one block of each group; 0: this rank has no layer of it."""
        return [group.nbytes for group in self._groups]

    def begin(self, moves: BlockMoves) -> None:
        with self._lock:
            self._begin(moves)
            self._begun += 1
            self._lock.notify_all()

    def _begin(self, moves: BlockMoves) -> None:
        with torch.inference_mode():
            self._wait(moves.waits)
            self._store(moves.out)
            if moves.back:
                free = self._mark()  # from here on, nothing reads what the blocks held before
                for transfer in moves.back:
                    self._load(transfer, free)
            self._wait(moves.waits)

    def finished(self) -> list[int]:
        known = self._reported
        over = [id for id, (e, _) in self._transfers.items() if id not in known and (e is None or e.query())]
        self._reported.update(over)
        return over

    def _wait(self, transfers: Sequence[int]) -> None:
        """Let the step's queue wait for those that were begun."""
        for id in transfers:
            event, _ = self._transfers.pop(id, (None, None))
            if event is not None:
                event.wait()
            self._reported.discard(id)

    @staticmethod
    def _wait_for(copies: Iterable[tuple[Any, frozenset[int]]], places: frozenset[int]) -> None:
        """Let the current stream wait for those copies of the other one that use some of these places."""
        for event, used in copies:
            if not places.isdisjoint(used):
                event.wait()

    def _store(self, moves: Sequence[BlockMove]) -> None:
        for copies in (self._writing, self._reading):
            while copies and copies[0][0].query():
                copies.popleft()
        if not self._streams:
            for move in moves:
                self._at_once(move, out=True)
            return
        for group, part in self._pieces(moves):
            buffer, copied = self._buffers[self._turn], self._copied[self._turn]
            if copied is not None:
                copied.wait()
            rows = buffer[: len(part) * group.nbytes].view(len(part), group.nbytes)
            group.read([move.block for move in part], rows)
            gathered, places = self._mark(), frozenset(move.place for move in part)
            with self._streams[0]:
                gathered.wait()
                self._wait_for(self._transfers.values(), places)  # a place that is still read may be given out again
                for run, memory in self._runs(group, part):
                    memory.copy_(rows[run].view(-1), non_blocking=True)
                self._copied[self._turn] = event = self._mark()
            self._writing.append((event, places))
            self._turn = 1 - self._turn
            self._counters["kv_host_stored_bytes"] += rows.nbytes

    def _load(self, transfer: BlockTransfer, free: Any) -> None:
        if not self._streams:
            for move in transfer.moves:
                self._at_once(move, out=False)
            self._transfers[transfer.id] = None, frozenset()
            return
        places = frozenset(move.place for move in transfer.moves)
        with self._streams[1]:
            free.wait()
            self._wait_for(self._writing, places)
            for group, part in self._pieces(transfer.moves):
                rows = self._buffers[2][: len(part) * group.nbytes].view(len(part), group.nbytes)
                for run, memory in self._runs(group, part):
                    rows[run].view(-1).copy_(memory, non_blocking=True)
                group.write([move.block for move in part], rows)
                self._counters["kv_host_loaded_bytes"] += rows.nbytes
            self._transfers[transfer.id] = event, places = self._mark(), places
            self._reading.append((event, places))

    def _at_once(self, move: BlockMove, out: bool) -> None:
        group = self._groups[move.group]
        if not group.nbytes:
            return
        row = self._place(move.place, group.nbytes)[None]
        self._counters["kv_host_stored_bytes" if out else "kv_host_loaded_bytes"] += row.nbytes
        if self._device.capabilities.host_memory:
            (group.read if out else group.write)([move.block], row)
            return
        rows = torch.empty(row.shape, dtype=torch.uint8, device=self._device.torch_device)
        if out:
            group.read([move.block], rows)
            row.copy_(rows)
        else:
            group.write([move.block], rows.copy_(row))

    def _pieces(self, moves: Sequence[BlockMove]) -> Iterator[tuple[BlockBytes, list[BlockMove]]]:
        """The moves of one group after another, by place, as many at a time as a buffer holds."""
        in_order = sorted(moves, key=lambda move: (move.group, move.place))
        for index, found in groupby(in_order, key=lambda move: move.group):
            group, several = self._groups[index], list(found)
            each = len(self._buffers[0]) // group.nbytes if group.nbytes else 0
            for at in range(0, len(several) if each else 0, each or 1):
                yield group, several[at : at + each]

    def _runs(self, group: BlockBytes, part: Sequence[BlockMove]) -> Iterator[tuple[slice, torch.Tensor]]:
        """The moves whose places lie one after another, and their host memory: one copy for all of them."""
        span, start = self._spans[part[0].group], 0
        for at in range(1, len(part) + 1):
            if at < len(part) and group.nbytes == span * self._page_bytes:
                before, place = part[at - 1].place, part[at].place
                if place == before + span and self._memory_of(place)[0] == self._memory_of(before)[0]:
                    continue
            yield slice(start, at), self._place(part[start].place, (at - start) * group.nbytes)
            start = at

    def _memory_of(self, place: int) -> tuple[int, int]:
        """The piece of host memory that has a place, and where it begins there."""
        slab, page = divmod(place, self._pages)
        piece, at = divmod(slab - 1, self._each)
        return piece, at * self.slab_bytes + page * self._page_bytes

    def _place(self, place: int, nbytes: int) -> torch.Tensor:
        """The host memory that begins at a place: uint8 [nbytes]."""
        piece, start = self._memory_of(place)
        return self._memory[piece][start : start + nbytes]

    def _piece(self, nbytes: int) -> torch.Tensor:
        try:
            pinned = list(self._device.pinned_buffers(1, nbytes))
        except RuntimeError as error:
            raise ConfigError(f"the host gives no {nbytes} more bytes of page-locked memory ({error}); set "
                              "infer.kv_host_memory to less, or raise `ulimit -l`") from error  # fmt: skip
        return pinned[0] if pinned else torch.empty(nbytes, dtype=torch.uint8)

    def _mark(self) -> Any:
        """An event after what was submitted to the current stream; None without streams."""
        if not self._streams:
            return None
        event = self._device.new_event()
        event.record()
        return event


def _streams(device: Device) -> list[Any]:
    """One for each direction; none on a device with one queue."""
    try:
        return [] if device.capabilities.host_memory else [device.new_stream() for _ in range(2)]
    except NotImplementedError:
        return []
