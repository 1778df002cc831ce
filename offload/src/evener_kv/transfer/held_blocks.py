"""Blocks that are held for the server that goes on with a request, and who is reading them.

Only the engine's thread holds and releases blocks. Threads that answer servers look them up. What was read counts only
if none of it was released meanwhile: a reader asks for that at its end.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from evener.engine.controller.blocks import BlockPool

#: A block's key: its group, and the digest of all tokens up to its end.
Key = tuple[int, bytes]
#: Readers that are remembered; the oldest are forgotten, and what they read does not count.
_MOST_READERS = 1024


@dataclass(eq=False)
class _Hold:
    """The blocks of one request, by key, and the time until which they are held."""

    request: str
    blocks: dict[Key, int]
    until: float
    released: bool = False


class HeldBlocks:
    """Holds blocks of ``pool`` for ``seconds`` seconds."""

    def __init__(self, pool: BlockPool, seconds: float) -> None:
        self._pool, self._seconds, self._lock = pool, seconds, threading.Lock()
        #: The oldest first.
        self._holds: dict[str, _Hold] = {}
        self._by_key: dict[Key, dict[_Hold, int]] = {}
        self._readers: dict[int, tuple[str, list[_Hold]]] = {}
        self._next = itertools.count(1)

    def __len__(self) -> int:
        return len(self._holds)

    def hold(self, request: str, keys: Sequence[Key]) -> None:
        """Hold the blocks with these keys; those that the pool does not know are left out."""
        blocks = {key: block for key in keys if (block := self._pool.find(key)) is not None}
        if not blocks or request in self._holds:
            return
        self._pool.retain(blocks.values())
        made = _Hold(request, blocks, time.monotonic() + self._seconds)
        with self._lock:
            self._holds[request] = made
            for key, block in blocks.items():
                self._by_key.setdefault(key, {})[made] = block

    def expire(self) -> None:
        """Release blocks that were read, and those held for too long."""
        if self._holds:
            now = time.monotonic()
            for name in [name for name, each in self._holds.items() if each.until <= now]:
                self._release(name)

    def release_oldest(self) -> bool:
        """Release the blocks that are held for longest. Returns whether there were any."""
        oldest = next(iter(self._holds), None)
        if oldest is not None:
            self._release(oldest)
        return oldest is not None

    def release_all(self) -> None:
        """Release everything."""
        while self.release_oldest():
            pass

    def _release(self, name: str) -> None:
        with self._lock:
            hold = self._holds.pop(name)
            hold.released = True
            for key in hold.blocks:
                holds = self._by_key[key]
                del holds[hold]
                if not holds:
                    del self._by_key[key]
        self._pool.release(reversed(hold.blocks.values()))

    def find(self, request: str, groups: int, digests: Sequence[bytes]) -> tuple[int, list[list[int]]]:
        """For each group, the block of each digest, 0: none. In any thread. Returns also a number for ``end``."""
        found, used = [[0] * len(digests) for _ in range(groups)], dict[_Hold, None]()
        with self._lock:
            for group, blocks in enumerate(found):
                for column, digest in enumerate(digests):
                    for hold, block in self._by_key.get((group, digest), {}).items():
                        blocks[column], used[hold] = block, None
                        break
            number = next(self._next)
            self._readers[number] = request, list(used)
            while len(self._readers) > _MOST_READERS:
                del self._readers[next(iter(self._readers))]
        return number, found

    def end(self, number: int) -> bool:
        """A reader has read what it needs: the blocks held for its request may be released. In any thread.
        Returns whether all blocks that it found were held until now."""
        with self._lock:
            request, holds = self._readers.pop(number, ("", None))
            if holds is None:
                return False
            if request in self._holds:
                self._holds[request].until = 0.0
            return not any(hold.released for hold in holds)
