"""The block pool: who holds which block, and which free blocks still hold a known prefix.

A block is free when nobody holds it. A free block keeps its contents and its key until it is handed out again, least
recently used first, so a prefix survives its request.

Blocks of different groups may have different sizes. The pool is made of *pages*; ``slab`` pages in a row are cut into
blocks of one *span* of pages at a time, and into others once all of them are free. A block is named by its first page.
Where all blocks have one size, a slab is a page is a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence


class BlockPool:
    """Reference counts over the blocks of ``count`` pages; those of the first slab are null blocks and never handed
    out."""

    def __init__(self, count: int, slab: int = 1) -> None:
        self.count, self.slab = count, slab
        self._references = [0] * count
        self._keys: list[Hashable | None] = [None] * count
        self._by_key: dict[Hashable, int] = {}
        self._spans = [slab] * (count // slab)
        #: Slabs that nobody holds a block of, and by span the free blocks of other slabs; those without a key first.
        self._slabs: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count // slab))
        self._parts: dict[int, OrderedDict[int, None]] = {}
        self._spare = 0

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._slabs) * self.slab + sum(span * len(part) for span, part in self._parts.items())

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return self.count - self.slab - self.free

    def take(self, count: int) -> list[int] | None:
        """``count`` blocks as large as a slab, held once each; None (and nothing taken) when fewer are free."""
        taken = self.take_all([(count, self.slab)])
        return None if taken is None else taken[0]

    def take_all(self, wanted: Sequence[tuple[int, int]]) -> list[list[int]] | None:
        """For each ``(count, span)`` so many blocks, held once each; None (and nothing taken) when one cannot be
        had."""
        totals: dict[int, int] = {}
        for count, span in wanted:
            totals[span] = totals.get(span, 0) + count
        needed = sum(self.slabs_for(n - len(self._parts.get(s, ())), s) for s, n in totals.items())
        if needed > len(self._slabs):
            return None
        self._spare = len(self._slabs) - needed
        return [[self._take(span) for _ in range(count)] for count, span in wanted]

    def slabs_for(self, count: int, span: int) -> int:
        """Slabs that ``count`` blocks of a span fill."""
        return max(0, -(-count * span // self.slab))

    def _take(self, span: int) -> int:
        """A free block without a key if one can be spared; then one of a slab in use, so that others stay whole."""
        part = self._parts.setdefault(span, OrderedDict())
        first = next(iter(part), None)
        spare = first is not None and self._keys[first] is not None and self._spare > 0 and self._whole_without_key()
        self._spare -= spare
        if first is None or spare:
            slab, _ = self._slabs.popitem(last=False)
            self._cut(slab, span)
            first = slab * self.slab
        else:
            del part[first]
        self._forget(first)
        self._references[first] = 1
        return first

    def _whole_without_key(self) -> bool:
        slab = next(iter(self._slabs), None)
        return slab is not None and not self._keyed(slab)

    def _keyed(self, slab: int) -> bool:
        return any(key is not None for key in self._keys[slab * self.slab : (slab + 1) * self.slab])

    def _cut(self, slab: int, span: int) -> None:
        """Put all blocks of a free slab but the first into use as free ones of this span."""
        pages = range(slab * self.slab, (slab + 1) * self.slab)
        if self._spans[slab] != span:
            for page in pages:
                self._forget(page)
            self._spans[slab] = span
        for block in pages[span::span]:
            self._put(block, span)

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
            self._keys[block] = None

    def _put(self, block: int, span: int) -> None:
        part = self._parts.setdefault(span, OrderedDict())
        part[block] = None
        if self._keys[block] is None:
            part.move_to_end(block, last=False)

    def find(self, key: Hashable) -> int | None:
        """The block that holds ``key``, or None. Nothing is held by it."""
        return self._by_key.get(key)

    def hold(self, block: int) -> None:
        """Hold a block once more."""
        if self._references[block] == 0:
            slab = block // self.slab
            span = self._spans[slab]
            if slab in self._slabs:
                del self._slabs[slab]
                self._cut(slab, span)
                self._put(slab * self.slab, span)
            del self._parts[span][block]
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one hold of each; null blocks are skipped. Free blocks without a key are reused first."""
        for block in blocks:
            if block == 0:
                continue
            assert self._references[block] > 0, f"block {block} is released more often than it was taken"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free(block)

    def _free(self, block: int) -> None:
        slab = block // self.slab
        span, start = self._spans[slab], slab * self.slab
        self._put(block, span)
        if not any(self._references[start : start + self.slab]):
            for each in range(start, start + self.slab, span):
                del self._parts[span][each]
            self._slabs[slab] = None
            if not self._keyed(slab):
                self._slabs.move_to_end(slab, last=False)

    def name(self, block: int, key: Hashable) -> None:
        """Say what a held block contains. The first block with a key keeps it."""
        if key not in self._by_key and self._keys[block] is None:
            self._by_key[key] = block
            self._keys[block] = key

    def forget_all(self) -> None:
        """Drop every key: no prefix is found any more."""
        self._by_key.clear()
        self._keys = [None] * self.count
