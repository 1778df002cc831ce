"""The controller's half: which blocks are in files on all ranks, and which are being copied.

A block is written as soon as host memory has it, so that it can leave that at once. Meanwhile its place is held. A
thread asks all ranks and takes their answers together: a block counts only where every rank could copy it.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import socket
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from evener.errors import ConfigError
from evener_kv.files.block_files import Key
from evener_kv.files.messages import Answer, Copied, Copy, Failed, Known, Open, Opened
from evener_kv.files.private_folder import open_private
from evener_kv.files.rank_files import PATIENCE, address_of, keys_of
from evener_kv.files.settings import FileSettings
from evener_kv.transfer.connection import Channel, TransferError

log = logging.getLogger("evener.kv")
T = TypeVar("T")
#: Seconds that ranks have to open their files, to copy some blocks, and that an engine that ends waits for copies.
_OPEN_SECONDS, _COPY_SECONDS, _END_SECONDS = 60.0, 300.0, 5.0
#: Blocks of one request to the ranks, so that a read does not wait long behind writes.
_AT_A_TIME = 32


@dataclass(eq=False)
class FileCopy:
    """A copy under way: ``places`` of host memory by key. ``over``: set by the thread, then ``done`` are those that
    worked on all ranks. ``lost``: ranks did not answer, and may be at it still: the places stay held for ever."""

    store: bool
    after: int
    places: dict[Key, int]
    over: threading.Event
    done: Collection[Key] = ()
    lost: bool = False


class StoredBlocks:
    """The blocks in files of ``ranks`` ranks.

    Raises:
        ConfigError: the ranks are not on this machine, or cannot use the folder.
    """

    def __init__(self, settings: FileSettings, fingerprint: str, ranks: int) -> None:
        self._settings, self._most = settings, settings.nbytes
        self.counters = Counter[str](kv_files_hits=0, kv_files_hit_tokens=0, kv_files_stored_blocks=0,
                                     kv_files_failures=0, kv_files_skipped_blocks=0)  # fmt: skip
        self._channels = [self._connect(rank) for rank in range(ranks)]
        #: Keys with bytes, the least recently used first.
        self._stored: OrderedDict[Key, int] = OrderedDict()
        self._total = 0
        self._gone: list[Key] = []
        self._pending: set[Key] = set()
        self._finished: deque[FileCopy] = deque()
        #: (reads first, then in order) for the thread.
        self._queue: list[tuple[bool, int, FileCopy | None]] = []
        self._numbers, self._changed, self._broken = itertools.count(), threading.Condition(), False
        self._closed = False
        self._open(fingerprint)
        self._thread = threading.Thread(target=self._run, name="evener-kv-files", daemon=True)
        self._thread.start()

    def __contains__(self, key: Key) -> bool:
        return key in self._stored and not self._broken

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def nbytes(self) -> int:
        """Bytes of all files of one rank."""
        return self._total

    @property
    def copying(self) -> int:
        """How many blocks are being written."""
        return len(self._pending)

    def wants(self, key: Key) -> bool:
        """Whether a block should be written."""
        return not self._broken and key not in self._stored and key not in self._pending

    def used(self, keys: Sequence[Key]) -> None:
        """These were used last."""
        for key in keys:
            if key in self._stored:
                self._stored.move_to_end(key)

    def start(self, places: dict[Key, int], after: int, store: bool) -> list[FileCopy]:
        """Begin to copy. The caller holds the places until ``finished`` returns the copies."""
        pairs, copies = list(places.items()), []
        for at in range(0, len(pairs), _AT_A_TIME):
            copies.append(FileCopy(store, after, dict(pairs[at : at + _AT_A_TIME]), threading.Event()))
        if store:
            self._pending.update(places)
        with self._changed:
            for copy in copies:
                heapq.heappush(self._queue, (store, next(self._numbers), copy))
            self._changed.notify()
        return copies

    def finished(self) -> list[FileCopy]:
        """Copies that are over and were not returned before."""
        found = [self._finished.popleft() for _ in range(len(self._finished))]
        for copy in found:
            failed = [key for key in copy.places if key not in copy.done]
            self.counters["kv_files_failures"] += len(failed)
            if copy.store:
                self._pending.difference_update(copy.places)
                self.counters["kv_files_stored_blocks"] += len(copy.done)
                for key in copy.done:
                    self._add(key)
            for key in failed:
                self._forget(key)
        return found

    def close(self) -> None:
        """Finish what was begun, within a few seconds. Calling it again does nothing."""
        with self._changed:
            heapq.heappush(self._queue, (True, next(self._numbers), None))
            self._changed.notify()
        self._thread.join(_END_SECONDS)
        if not self._thread.is_alive() and self._channels:
            self.finished()
            if self._gone:
                self._copy(FileCopy(True, 0, {}, threading.Event()), self._gone)
        self._closed = True
        for channel in self._channels:
            channel.close()
        self._channels = []

    def _add(self, key: Key) -> None:
        size = self._sizes[key[0]]
        self._stored[key] = size
        self._total += size
        while self._total > self._most:
            self._forget(next(iter(self._stored)))

    def _forget(self, key: Key) -> None:
        """The ranks are told with the next copy."""
        size = self._stored.pop(key, None)
        self._total -= size or 0
        with self._changed:
            self._gone.append(key)

    # The ranks.

    def _connect(self, rank: int) -> Channel:
        what = f"offload.kv_files={self._settings.folder}"
        try:
            folder = open_private(self._settings.folder)
            try:
                sock = socket.socket(socket.AF_UNIX)
                sock.connect(address_of(folder, self._settings, rank))
            finally:
                os.close(folder)
        except OSError as error:
            raise ConfigError(f"{what}: rank {rank} cannot be reached ({error.strerror}): all ranks must run on this "
                              "machine, as this user") from error  # fmt: skip
        return Channel(sock, time.monotonic() + _OPEN_SECONDS)

    def _open(self, fingerprint: str) -> None:
        """Open the files of all ranks. Those that one of them does not have are removed."""
        what = f"offload.kv_files={self._settings.folder}"
        try:
            for channel in self._channels:
                channel.send(Open(fingerprint))
            opened = [self._answer(channel, Opened) for channel in self._channels]
            known = [
                [key for _ in range(one.parts) for part in [self._answer(channel, Known)]
                 for key in keys_of(part.groups, part.digests)]
                for channel, one in zip(self._channels, opened, strict=True)
            ]  # fmt: skip
        except TransferError as error:
            raise ConfigError(f"{what} cannot be used: {error}") from error
        self._sizes = [max(sizes) for sizes in zip(*(one.file_bytes for one in opened), strict=True)]
        having = [{group for group, size in enumerate(one.file_bytes) if size} for one in opened]
        everywhere = [set(keys) for keys in known]
        for key in dict.fromkeys(key for keys in known for key in keys):
            ranks = zip(having, everywhere, strict=True)
            if all(key in keys for groups, keys in ranks if key[0] in groups):
                self._add(key)
            else:
                self._forget(key)
        log.info("%s has %d blocks of earlier runs", what, len(self._stored))

    @staticmethod
    def _answer(channel: Channel, kind: type[T]) -> T:
        found = channel.receive(Answer)
        if isinstance(found, Failed):
            raise TransferError(found.reason)
        if not isinstance(found, kind):
            raise TransferError(f"the answer is {type(found).__name__}")
        return found

    def _run(self) -> None:
        """In a thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                _, _, copy = heapq.heappop(self._queue)
                if copy is None:
                    return
                gone, self._gone = self._gone, []
            self._copy(copy, gone)
            self._finished.append(copy)
            copy.over.set()

    def _copy(self, copy: FileCopy, gone: Sequence[Key]) -> None:
        keys, groups = list(copy.places), [group for group, _ in copy.places]
        if self._broken:
            return
        digests, places = b"".join(digest for _, digest in keys), list(copy.places.values())
        gone_groups, gone_digests = [group for group, _ in gone], b"".join(digest for _, digest in gone)
        request = Copy(copy.store, copy.after, groups, digests, places, gone_groups, gone_digests)
        try:
            for channel in self._channels:
                channel.deadline = time.monotonic() + PATIENCE + _COPY_SECONDS
                channel.send(request)
            done = [self._answer(channel, Copied).done for channel in self._channels]
        except TransferError as error:
            self._broken = copy.lost = True
            # A closed engine does not use them anyway.
            level = logging.DEBUG if self._closed else logging.WARNING
            log.log(level, "KV blocks in %s are not used any more: %s", self._settings.folder, error)
            return
        copy.done = {key for key, each in zip(keys, zip(*done, strict=True), strict=True) if all(each)}
