"""The block pool: which blocks are held by requests, and which free blocks still contain a cached prefix.

Tables hold blocks, and a block that several requests share is held several times. A block that nobody holds is free. It
keeps its contents and its key until it is given out again, least recently used first, so a prefix outlives its request.

Blocks of different groups may have different sizes. The pool consists of *pages* of equal size. A *slab* is a fixed
number of pages in a row. It is cut into blocks of ``span`` pages each, and may be cut differently once all of them are
free. A block's id is the number of its first page. If all groups have blocks of one size, slab, block and page are the
same.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from typing import Any


class CacheListener:
    """Hears which blocks enter and leave the prefix cache. This one ignores it; see ``engine.controller.state`` for
    keys. The engine calls it between steps, so it must return at once."""

    def stored(self, key: Hashable, parent: bytes | None, tokens: Sequence[int], plain: bool) -> None:
        """A block entered the cache. ``parent``: the digest of the block before it; None: it is the first.
        ``tokens``: its ids. ``plain``: nothing but token ids made its key, neither a salt nor an adapter nor media."""

    def removed(self, block: int, key: Any) -> None:
        """The block with this key is given out again. Its contents stay until a plan writes there."""

    def cleared(self) -> None:
        """The cache is empty; ``removed`` was not called for its blocks."""

    def close(self) -> None:
        """The engine ends."""


class BlockPool:
    """Reference counts and cache keys of the blocks in ``count`` pages, with ``slab`` pages in each slab. The blocks of
    the first slab are null blocks, which are never given out."""

    def __init__(self, count: int, slab: int = 1) -> None:
        self.count, self.slab = count, slab
        self.listeners: list[CacheListener] = []
        self._references = [0] * count
        self._keys: list[Hashable | None] = [None] * count
        self._by_key: dict[Hashable, int] = {}
        self._spans = [slab] * (count // slab)
        #: Slabs whose blocks are all free, and by span the free blocks of other slabs. Both are in the order in which
        #: they are given out: those without a key first, then the least recently used.
        self._free_slabs: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count // slab))
        self._free_blocks = defaultdict[int, OrderedDict[int, None]](OrderedDict)
        self._spare_slabs = 0

    @property
    def free(self) -> int:
        """Number of pages whose blocks are free."""
        return len(self._free_slabs) * self.slab + sum(span * len(part) for span, part in self._free_blocks.items())

    @property
    def used(self) -> int:
        """Number of pages in blocks that are held."""
        return self.count - self.slab - self.free

    def allocate_all(self, wanted: Sequence[tuple[int, int]]) -> list[list[int]] | None:
        """Take ``count`` blocks of ``span`` pages for each pair ``(count, span)``, held once each. Returns the ids for
        each pair; None, and takes none, if the pool has too few."""
        totals: dict[int, int] = {}
        for count, span in wanted:
            totals[span] = totals.get(span, 0) + count
        needed = sum(max(0, -(-(n - len(self._free_blocks.get(s, ()))) * s // self.slab)) for s, n in totals.items())
        if needed > len(self._free_slabs):
            return None
        self._spare_slabs = len(self._free_slabs) - needed
        return [self._allocate(count, span) for count, span in wanted]

    def _allocate(self, count: int, span: int) -> list[int]:
        if span < self.slab:
            return [self._allocate_block(span) for _ in range(count)]
        # A block is a slab. A long prompt takes thousands, before its first step begins.
        slabs = list(islice(self._free_slabs, count))
        for slab in slabs:
            del self._free_slabs[slab]
            if self._spans[slab] != span:
                self._split_slab(slab, span)
            self._drop_key(slab * self.slab)
            self._references[slab * self.slab] = 1
        return [slab * self.slab for slab in slabs]

    def _allocate_block(self, span: int) -> int:
        """Take a free block. One from a slab in use is preferred so that other slabs stay whole. But a block with a key
        is spared if there is a free slab without keys that this call does not need otherwise."""
        first = next(iter(part)) if (part := self._free_blocks.get(span)) else None
        if first is not None and self._keys[first] is not None and self._spare_slabs > 0:
            spare = not self._has_key(next(iter(self._free_slabs)))
            self._spare_slabs -= spare
            first = None if spare else first
        if first is None:
            slab, _ = self._free_slabs.popitem(last=False)
            self._split_slab(slab, span)
            first = slab * self.slab
        else:
            del self._free_blocks[span][first]
        self._drop_key(first)
        self._references[first] = 1
        return first

    def _has_key(self, slab: int) -> bool:
        return self._keys[slab * self.slab : (slab + 1) * self.slab].count(None) < self.slab

    def _split_slab(self, slab: int, span: int) -> None:
        """Cut a free slab into blocks of ``span`` pages. All but the first become free; the caller takes that."""
        pages = range(slab * self.slab, (slab + 1) * self.slab)
        if self._spans[slab] != span:
            for page in pages:
                self._drop_key(page)
            self._spans[slab] = span
        for block in pages[span::span]:
            self._append_free(block, span)

    def _drop_key(self, block: int) -> None:
        if (key := self._keys[block]) is not None:
            del self._by_key[key]
            self._keys[block] = None
            for listener in self.listeners:
                listener.removed(block, key)

    def _append_free(self, block: int, span: int) -> None:
        part = self._free_blocks[span]
        part[block] = None
        if self._keys[block] is None:
            part.move_to_end(block, last=False)

    def find(self, key: Hashable) -> int | None:
        """The block with this key, or None. Does not hold it."""
        return self._by_key.get(key)

    def retain(self, block: int) -> None:
        """Hold a block once more; a free one is taken out of the free blocks."""
        if self._references[block] == 0:
            slab, span = block // self.slab, self._spans[block // self.slab]
            if slab in self._free_slabs:
                del self._free_slabs[slab]
                self._split_slab(slab, span)
                self._append_free(slab * self.slab, span)
            del self._free_blocks[span][block]
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one hold of each block. Null blocks are skipped."""
        for block in filter(None, blocks):
            assert self._references[block] > 0, f"block {block} is released more often than it was taken"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free(block)

    def _free(self, block: int) -> None:
        slab = block // self.slab
        span, start, has_key = self._spans[slab], slab * self.slab, self._keys[block] is not None
        if span != self.slab:
            self._append_free(block, span)
            if any(self._references[start : start + self.slab]):
                return
            for each in range(start, start + self.slab, span):
                del self._free_blocks[span][each]
            has_key = self._has_key(slab)
        self._free_slabs[slab] = None
        if not has_key:
            self._free_slabs.move_to_end(slab, last=False)

    def set_key(self, block: int, key: Hashable) -> bool:
        """Record what a held block contains. Returns False if another block has this key already; that one keeps it."""
        if new := self._keys[block] is None and self._by_key.setdefault(key, block) == block:
            self._keys[block] = key
        return new

    def clear_keys(self) -> None:
        """Forget all keys: the prefix cache is empty then."""
        self._by_key.clear()
        self._keys = [None] * self.count
        for listener in self.listeners:
            listener.cleared()
