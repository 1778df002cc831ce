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
from typing import Any


class CacheListener:
    """Is told which blocks enter and leave the prefix cache; this base class ignores it. ``engine.controller.state``
    defines the keys. The engine calls it between steps, so it must return at once."""

    def stored(self, key: Hashable, parent: bytes | None, tokens: Sequence[int], plain: bool) -> None:
        """A block entered the cache. ``parent``: the digest of the block before it; None: it is the first.
        ``tokens``: its ids. ``plain``: its key depends on token ids only, not on a salt, an adapter or media."""

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
        #: Slabs whose blocks are all free. ``_free_slabs`` has those without keys, which are given out first, from its
        #: end; ``_cached_slabs`` the others, least recently used first. A long prompt takes thousands at once.
        self._free_slabs = list(range(count // slab - 1, 0, -1))
        self._cached_slabs = OrderedDict[int, None]()
        #: For each span, the free blocks of the other slabs in the order of use: those without a key first.
        self._free_blocks = defaultdict[int, OrderedDict[int, None]](OrderedDict)
        self._spare_slabs = 0

    @property
    def free(self) -> int:
        """Number of pages whose blocks are free."""
        slabs = len(self._free_slabs) + len(self._cached_slabs)
        return slabs * self.slab + sum(span * len(part) for span, part in self._free_blocks.items())

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
        self._spare_slabs = len(self._free_slabs) + len(self._cached_slabs) - needed
        if self._spare_slabs < 0:
            return None
        return [self._allocate(count, span) for count, span in wanted]

    def _allocate(self, count: int, span: int) -> list[int]:
        if span < self.slab:
            return [self._allocate_block(span) for _ in range(count)]
        slabs, left = self._free_slabs[: -count - 1 : -1], max(0, len(self._free_slabs) - count)
        del self._free_slabs[left:]
        slabs += [self._take_cached(span) for _ in range(count - len(slabs))]
        blocks = [slab * self.slab for slab in slabs]
        for slab, block in zip(slabs, blocks, strict=True):
            self._spans[slab] = span
            self._references[block] = 1
        return blocks

    def _take_cached(self, span: int) -> int:
        """Take the least recently used slab with keys. They are dropped, unless the slab is already cut into smaller
        blocks of ``span`` pages: each of those keeps its key until it is given out."""
        slab, _ = self._cached_slabs.popitem(last=False)
        if span == self.slab or self._spans[slab] != span:
            for page in range(slab * self.slab, (slab + 1) * self.slab):
                self._drop_key(page)
        return slab

    def _allocate_block(self, span: int) -> int:
        """Take a free block. One from a slab in use is preferred so that other slabs stay whole. But a block with a key
        is spared if there is a free slab without keys that this call does not need otherwise."""
        first = next(iter(part)) if (part := self._free_blocks.get(span)) else None
        if first is not None and self._keys[first] is not None and self._free_slabs and self._spare_slabs > 0:
            self._spare_slabs -= 1
            first = None
        if first is None:
            slab = self._free_slabs.pop() if self._free_slabs else self._take_cached(span)
            self._split_slab(slab, span)
            first = slab * self.slab
        del self._free_blocks[span][first]
        self._drop_key(first)
        self._references[first] = 1
        return first

    def _split_slab(self, slab: int, span: int) -> None:
        """Cut a slab, which is free, into free blocks of ``span`` pages."""
        self._spans[slab] = span
        for block in (*range(slab * self.slab + span, (slab + 1) * self.slab, span), slab * self.slab):
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
        part.move_to_end(block, last=self._keys[block] is not None)

    def find(self, key: Hashable) -> int | None:
        """The block with this key, or None. Does not hold it."""
        return self._by_key.get(key)

    def retain(self, blocks: Iterable[int]) -> None:
        """Hold each block once more; free ones are taken out of the free blocks. Null blocks are skipped."""
        for block in filter(None, blocks):
            if self._references[block] == 0:
                slab, span = block // self.slab, self._spans[block // self.slab]
                if slab in self._cached_slabs:
                    del self._cached_slabs[slab]
                    self._split_slab(slab, span)
                del self._free_blocks[span][block]
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one hold of each block. Null blocks are skipped."""
        references = self._references
        for block in filter(None, blocks):
            assert references[block] > 0, f"block {block} is released more often than it was taken"
            references[block] -= 1
            if references[block]:
                continue
            slab, has_key = block // self.slab, self._keys[block] is not None
            if (span := self._spans[slab]) != self.slab:
                self._append_free(block, span)
                pages = slice(slab * self.slab, (slab + 1) * self.slab)
                if any(references[pages]):
                    continue
                for each in range(pages.start, pages.stop, span):
                    del self._free_blocks[span][each]
                has_key = self._keys[pages].count(None) < self.slab
            if has_key:
                self._cached_slabs[slab] = None
            else:
                self._free_slabs.append(slab)

    def set_key(self, block: int, key: Hashable) -> bool:
        """Record what a held block contains. Returns False, and changes nothing, if the block has a key already or
        another block has this one."""
        if new := self._keys[block] is None and self._by_key.setdefault(key, block) == block:
            self._keys[block] = key
        return new

    def clear_keys(self) -> None:
        """Forget all keys, which empties the prefix cache."""
        self._by_key.clear()
        self._keys = [None] * self.count
        self._free_slabs[:0] = reversed(self._cached_slabs)
        self._cached_slabs.clear()
        for listener in self.listeners:
            listener.cleared()
