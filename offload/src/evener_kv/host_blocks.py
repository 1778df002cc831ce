"""The controller's half: which blocks the host keeps, and which requests wait for blocks.

Places in host memory are managed as the pool of the device is: by a ``BlockPool`` with the same slabs, pages and spans,
whose blocks are all free and have keys. So blocks of all sizes share the memory, and the least recently used go first.

- A block that is taken for something else leaves the prefix cache. If the host does not keep it yet, it gets a place,
  and the next plan copies it there before anything else writes to it.
- When a request may start, the blocks of its prefix are looked up in both pools. Those that only the host has get
  blocks of the device, which the next plan begins to fill. The request holds them, and waits until a rank reports that
  they are there. Then it starts with an ordinary hit of the prefix cache.
- With files (``offload.kv_files``), a block is written to one as soon as it is in host memory. What a request's prefix
  has only there is read to host memory first, while the request waits.
- A transfer is waited for by the first plan that could touch its blocks, on all ranks: the plan in which a request
  starts that has one of them, or the next one after they were released. A report only says when waiting costs nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from evener.contracts.connector import BlockMove, BlockMoves, BlockTransfer, Connector, StartingRequest
from evener.engine.controller.blocks import BlockPool, CacheListener
from evener.engine.controller.state import BlockTable, StateManager
from evener_kv.counted import Counted
from evener_kv.files.stored_blocks import FileCopy, StoredBlocks

#: The most requests that wait for blocks at a time. They hold blocks that running ones may need.
AT_A_TIME = 8
#: Seconds that a request waits for files; and that an engine without other work waits before it looks again.
FILE_SECONDS, _PAUSE = 30.0, 0.002
#: Of the places of host memory, the share that may be held while they are written to files.
_WRITING_SHARE = 0.25
#: A block's key: its group, and the digest of all tokens up to its end.
_Key = tuple[int, bytes]


@dataclass
class _Load:
    """What one request waits for: its transfer, the blocks that it holds, the length of its prefix in blocks, of which
    so many tokens come from the host, and whether it may start."""

    transfer: int
    blocks: list[int]
    columns: int
    tokens: int
    over: bool = False


@dataclass
class _FileRead:
    """What one request has had read from files, and until when it waits; ``tokens``: of the blocks."""

    copies: list[FileCopy]
    until: float
    tokens: int = 0

    @property
    def over(self) -> bool:
        return all(copy.over.is_set() for copy in self.copies)


class HostBlocks(Connector, CacheListener):
    """Keeps what leaves the prefix cache of ``state`` in ``slabs`` slabs of host memory, and in ``files``.

    Attributes:
        unwritten: blocks with keys that something else fills with the next plan; they leave without being kept.
    """

    def __init__(self, state: StateManager, slabs: int, files: StoredBlocks | None = None) -> None:
        self._state, self._pool, self.files = state, state.pool, files
        self.places = BlockPool((slabs + 1) * state.pool.slab, state.pool.slab)
        self.unwritten: Collection[int] = ()
        self._pool.listeners.append(self)
        self._hits = Counter[str](kv_host_hits=0, kv_host_hit_tokens=0)
        self.counters = self._hits if files is None else Counted(files.counters, self._hits)
        self._loads: dict[str, _Load] = {}
        #: The digests of waiting requests, and the free pages when each was looked up last.
        self._tables: dict[str, BlockTable] = {}
        self._looked_up: dict[str, int] = {}
        #: Blocks that a transfer writes to which no plan has waited for.
        self._incoming: dict[int, int] = {}
        self._next_transfer = 0
        # For the next plan. The places that it reads are held until it is made, so that it does not write to them.
        self._out: dict[_Key, BlockMove] = {}
        self._back: list[BlockTransfer] = []
        self._waits: set[int] = set()
        self._reading: list[int] = []
        # For files. Blocks of adapters and media are not written: their keys may mean something else in another run.
        self._plain: set[_Key] = set()
        self._made = 0
        self._reads: dict[str, _FileRead] = {}

    def stored(self, key: Any, parent: bytes | None, tokens: Sequence[int], plain: bool) -> None:
        if plain and self.files is not None:
            self._plain.add(key)

    def close(self) -> None:
        if self.files is not None:
            self.files.close()

    def removed(self, block: int, key: _Key) -> None:
        """A block of the device leaves the prefix cache. One that a transfer still writes to is no exception: the next
        plan waits for that first, because the block was released."""
        if block in self.unwritten:
            self._plain.discard(key)
            return
        place = self.places.find(key)
        if place is None:
            taken = self.places.allocate_all([(1, self._state.spans[key[0]])])
            if taken is None:
                self._plain.discard(key)
                return  # what is being read now fills the host's memory
            ((place,),) = taken
            self.places.set_key(place, key)
            self._out[key] = BlockMove(key[0], block, place)
        else:
            self._plain.discard(key)
            self.places.retain([place])
        self.places.release([place])

    def ready(self, request: StartingRequest, busy: bool) -> bool:
        if self.files is not None and self._waits_for_files(self.files, request, busy):
            return False
        load = self._loads.get(request.id)
        if load is None:
            if len(self._loads) >= AT_A_TIME:
                return not busy
            load = self._look_up(request)
        return load is None or load.over or not busy

    def _look_up(self, request: StartingRequest) -> _Load | None:
        """Begin to load what the host has more of the request's prefix than the device; None if that is nothing."""
        if request.exclusive:  # nobody may hold a block when it starts
            self.give_back()
        forks = request.parent is not None and request.parent.finish is None
        if request.exclusive or request.needs_whole_prompt or forks:
            return None
        if self._looked_up.get(request.id) == self._pool.free:
            return None
        self._looked_up[request.id] = self._pool.free
        digests = self._digests(request)
        here = self._state.longest_hit(digests, self._pool.find)
        found = self._state.longest_hit(digests, self._find)
        while found > here:
            if (load := self._load(digests[:found], here)) is not None:
                self._loads[request.id] = load
                return load
            found = self._state.longest_hit(digests[: found * 3 // 4], self._find)  # what the free blocks may hold
        return None

    def _digests(self, request: StartingRequest) -> list[bytes]:
        """The digests of the blocks of its prefix; its last token is always computed."""
        table = self._tables.get(request.id)
        if table is None:
            message = request.message
            table = self._tables[request.id] = self._state.new_table(message.cache_salt, message.media)
        columns = (len(request.tokens) - 1) // self._state.block_size
        self._state.extend_digests(table, request.tokens, columns)
        return table.digests[:columns]

    def _find(self, key: _Key) -> int | None:
        return self._pool.find(key) or self.places.find(key)

    def _waits_for_files(self, files: StoredBlocks, request: StartingRequest, busy: bool) -> bool:
        """Whether a request waits for blocks that are read from files. Each request has them read once."""
        self._settle(files)
        read = self._reads.get(request.id)
        if read is None:
            if busy and sum(not each.over for each in self._reads.values()) >= AT_A_TIME:
                return True
            read = self._reads[request.id] = self._read(files, request)
        over = read.over or time.monotonic() >= read.until
        if not (over or busy):
            read.copies[-1].over.wait(_PAUSE)
            over = read.over
        if over:
            self._settle(files)  # the thread may have finished after the last time
        return not over

    def _read(self, files: StoredBlocks, request: StartingRequest) -> _FileRead:
        """Begin to read what only files have of the request's prefix."""
        state, read = self._state, _FileRead([], time.monotonic() + FILE_SECONDS)
        forks = request.parent is not None and request.parent.finish is None
        if request.exclusive or request.needs_whole_prompt or forks or request.message.adapter or request.message.media:
            return read
        whole = self._digests(request)

        def find(key: _Key) -> int | None:
            return self._find(key) or (1 if key in files else None)

        here, found = state.longest_hit(whole, self._find), state.longest_hit(whole, find)
        while found > here:
            digests = whole[:found]
            keys = [
                (group, digest) for group in range(len(state.specs))
                for digest in digests[state.first_live_block(group, found * state.block_size) :]
            ]  # fmt: skip
            held = [place for key in keys if (place := self.places.find(key)) is not None]
            wanted = [key for key in keys if self._find(key) is None]
            self.places.retain(held)
            taken = self.places.allocate_all([(1, state.spans[group]) for group, _ in wanted])
            self.places.release(reversed(held))
            if taken is not None:
                places = {key: place for key, (place,) in zip(wanted, taken, strict=True)}
                read.copies = files.start(places, self._made, store=False)
                read.tokens = (found - here) * state.block_size
                files.used(keys)
                return read
            found = state.longest_hit(digests[: found * 3 // 4], find)  # what host memory may hold
        return read

    def _settle(self, files: StoredBlocks) -> None:
        """Take what the thread has finished: places of written blocks are free to go, and read ones have their keys."""
        for copy in files.finished():
            for key, place in copy.places.items():
                if not copy.store and key in copy.done and self.places.find(key) is None:
                    self.places.set_key(place, key)
            if not copy.lost:
                self.places.release(reversed(list(copy.places.values())))

    def _write(self, files: StoredBlocks, moves: Iterable[tuple[_Key, BlockMove]]) -> None:
        """Begin to write blocks that the plan copies to host memory."""
        most, places = _WRITING_SHARE * (self.places.count - self.places.slab), dict[_Key, int]()
        for key, move in moves:
            plain, span = key in self._plain, self._state.spans[key[0]]
            self._plain.discard(key)
            if not plain or not files.wants(key):
                files.used([key])
                continue
            if (files.copying + len(places) + 1) * span > most:
                files.counters["kv_files_skipped_blocks"] += 1
                continue
            self.places.retain([move.place])
            places[key] = move.place
        if places:
            files.start(places, self._made, store=True)

    def _load(self, digests: Sequence[bytes], here: int) -> _Load | None:
        """Hold the blocks of a prefix, of which the device has the first ``here``, and plan copies of those that only
        the host has. None, with nothing held, if too few blocks are free."""
        state, size = self._state, self._state.block_size
        firsts = [state.first_live_block(group, len(digests) * size) for group in range(len(state.specs))]
        keys = [[(group, digest) for digest in digests[first:]] for group, first in enumerate(firsts)]
        missing = [[key for key in group if self._pool.find(key) is None] for group in keys]
        held = [block for group in keys for key in group if (block := self._pool.find(key)) is not None]
        places = [[place for key in group if (place := self.places.find(key)) is not None] for group in missing]
        reading = [place for group in places for place in group]
        self._pool.retain(held)
        self.places.retain(reading)
        counts = [(len(group), span) for group, span in zip(missing, state.spans, strict=True)]
        taken = self._pool.allocate_all(counts)
        if taken is None:
            self._pool.release(reversed(held))
            self.places.release(reversed(reading))
            return None
        transfer, moves = self._next_transfer, list[BlockMove]()
        self._next_transfer += 1
        for group, blocks in enumerate(taken):
            for key, block, place in zip(missing[group], blocks, places[group], strict=True):
                self._pool.set_key(block, key)
                self._incoming[block] = transfer
                moves.append(BlockMove(group, block, place))
            held += blocks
        self._reading += reading
        self._back.append(BlockTransfer(transfer, moves))
        return _Load(transfer, held, len(digests), (len(digests) - here) * size)

    def started(self, request: StartingRequest) -> None:
        load = self._loads.get(request.id)
        if load is not None:
            assert request.table.cached_blocks >= load.columns, "a request starts with what it has waited for"
            self._hits.update(kv_host_hits=1, kv_host_hit_tokens=load.tokens)
        read = self._reads.get(request.id)
        if read is not None and self.files is not None and load is not None and any(each.done for each in read.copies):
            self.files.counters.update(kv_files_hits=1, kv_files_hit_tokens=min(read.tokens, load.tokens))
        self.dropped(request)
        if self._incoming:
            self._waits |= {self._incoming[b] for part in request.table.blocks for b in part if b in self._incoming}

    def dropped(self, request: StartingRequest) -> None:
        self._reads.pop(request.id, None)
        self._tables.pop(request.id, None)
        self._looked_up.pop(request.id, None)
        self._release(request.id)

    def _release(self, name: str) -> None:
        load = self._loads.pop(name, None)
        if load is not None:
            self._waits.add(load.transfer)  # the blocks may be used for something else now
            self._pool.release(reversed(load.blocks))

    def give_back(self) -> bool:
        names = list(self._loads)
        for name in names:
            self._release(name)
        return bool(names)

    def moves(self) -> BlockMoves | None:
        # A place may have been taken for another block since.
        leaving = {key: move for key, move in self._out.items() if self.places.find(key) == move.place}
        out = list(leaving.values())
        self._plain.difference_update(key for key in self._out if key not in leaving)
        back, waits = self._back, sorted(self._waits)
        self.places.release(reversed(self._reading))
        self._out, self._back, self._reading = {}, [], []
        self._waits.clear()
        if waits:
            self._incoming = {block: each for block, each in self._incoming.items() if each not in waits}
            self.done(waits)
        if not (out or back or waits):
            return None
        self._made += 1
        if self.files is not None:
            self._settle(self.files)
            self._write(self.files, leaving.items())
        return BlockMoves(out=out, back=back, waits=waits)

    def done(self, transfers: Sequence[int]) -> None:
        for load in self._loads.values():
            load.over = load.over or load.transfer in transfers
