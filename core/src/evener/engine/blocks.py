"""The block pool: who holds which block, and which free blocks still hold a known prefix.

A block is free when nobody holds it. A free block keeps its contents and its key until it is handed out again, least
recently used first, so a prefix survives its request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable


class BlockPool:
    """Reference counts over blocks 1 … ``count`` - 1; block 0 is the null block and never handed out."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._references = [0] * count
        self._keys: list[Hashable | None] = [None] * count
        self._by_key: dict[Hashable, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count))

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.count - 1 - len(self._free)

    def take(self, count: int) -> list[int] | None:
        """``count`` blocks, held once each; None (and nothing taken) when fewer are free."""
        if count > len(self._free):
            return None
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            key = self._keys[block]
            if key is not None:
                del self._by_key[key]
                self._keys[block] = None
            self._references[block] = 1
            taken.append(block)
        return taken

    def find(self, key: Hashable) -> int | None:
        """The block that holds ``key``, or None. Nothing is held by it."""
        return self._by_key.get(key)

    def is_free(self, block: int) -> bool:
        """True if nobody holds the block."""
        return self._references[block] == 0

    def hold(self, block: int) -> None:
        """Hold a block once more."""
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one hold of each; null blocks are skipped. Free blocks without a key are reused first."""
        for block in blocks:
            if block == 0:
                continue
            assert self._references[block] > 0, f"block {block} is released more often than it was taken"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)

    def name(self, block: int, key: Hashable) -> None:
        """Say what a held block contains. The first block with a key keeps it."""
        if key not in self._by_key and self._keys[block] is None:
            self._by_key[key] = block
            self._keys[block] = key

    def forget_all(self) -> None:
        """Drop every key: no prefix is found any more."""
        self._by_key.clear()
        self._keys = [None] * self.count
