"""The state manager: block tables of requests, the prefix cache, and blocks that are no longer needed.

A request has one block table for each state group. Block j of a table holds the state of the same tokens in all groups.
Groups differ only in which of these blocks later tokens still read, which their ``StateKind`` says: all of them (full
attention), those of a window, the last one (a recurrent state). The others are *dead*. They go back to the pool as soon
as the step that made them dead is read.

A prefix of n blocks can be reused if every group still has the blocks of it that the next token reads. Cached blocks
are found by a digest of all tokens up to their end, of the media among these, and of the request's ``cache_salt``.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import msgspec

from evener.contracts.media import MediaItem
from evener.contracts.state import StateKind, StateSpec
from evener.engine.controller.blocks import BlockPool
from evener.engine.wire.media import overlapping_items
from evener.engine.wire.plan import BlockCopy
from evener.engine.wire.slabs import find_kinds, slabs_needed

_NO_SALT = hashlib.sha256(b"").digest()


@dataclass
class BlockTable:
    """One request's blocks.

    Attributes:
        salt: digest of the request's ``cache_salt``.
        blocks: for each group the block ids, 0 (the null block) where a block is dead or was never needed.
        first_live: for each group the index of the first block that is not dead.
        digests: the cache keys of the first full blocks; those of a prompt are all computed when it starts.
        cached_blocks: how many blocks the prefix cache knows from this table.
        exclusive: the request has the pool for itself, and its state neither comes from nor goes to the prefix cache.
        media: the items that stand for some of the request's tokens.
    """

    salt: bytes
    blocks: list[list[int]]
    first_live: list[int]
    digests: list[bytes] = field(default_factory=list)
    cached_blocks: int = 0
    exclusive: bool = False
    media: Sequence[MediaItem] = ()


class Growth(msgspec.Struct, frozen=True):
    """New entries of a table: for each group the block ids from column ``start`` on."""

    start: int
    blocks: tuple[tuple[int, ...], ...]


class StateManager:
    """Gives the blocks of one pool to the tables of requests. It never looks inside a block.

    Args:
        specs: one for each group.
        kinds: registered kinds by name.
        block_size: tokens of a block.
        slabs: those of the pool, including the null slab; a slab is as large as the largest block of a group.
        prefix_cache: whether computed blocks can be found again.
        cuts: for each group how many of its blocks a slab holds; default: one each.

    Raises:
        UnknownNameError: no package registers the kind of a group.
    """

    def __init__(
        self, specs: Sequence[StateSpec], kinds: Mapping[str, StateKind], block_size: int, slabs: int,
        prefix_cache: bool = True, cuts: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.specs, self._kinds = tuple(specs), find_kinds(specs, kinds)
        self.block_size, self.prefix_cache = block_size, prefix_cache
        self.cuts = tuple(cuts) or (1,) * len(self.specs)
        slab = math.lcm(*self.cuts)  # pages: the largest unit that divides every group's blocks
        self.spans = tuple(slab // cut for cut in self.cuts)
        self.slabs, self.pool = slabs, BlockPool(slabs * slab, slab)
        #: Whether one step must compute all tokens of a request.
        self.undivided = any(kind.undivided for kind in self._kinds)
        #: Groups whose blocks can become dead. The first live block never moves back, so one position far ahead tells.
        self._mortal = [group for group in range(len(self.specs)) if self.first_live_block(group, 1 << 40)]

    def slabs_for(self, tokens: int, step_tokens: int) -> int:
        """Slabs that a request of ``tokens`` tokens holds at most, if a step adds at most ``step_tokens`` of them."""
        return slabs_needed(self.specs, self._kinds, self.cuts, self.block_size, tokens, step_tokens)

    def new_table(self, salt: str, media: Sequence[MediaItem] = ()) -> BlockTable:
        """A table without blocks."""
        empty: list[list[int]] = [[] for _ in self.specs]
        return BlockTable(hashlib.sha256(salt.encode()).digest(), empty, [0] * len(self.specs), media=media)

    def open(
        self, tokens: Sequence[int], salt: str, exclusive: bool = False, reuse: bool = True,
        media: Sequence[MediaItem] = (),
    ) -> tuple[BlockTable, int]:  # fmt: skip
        """Make a table for a request whose known tokens are ``tokens``. It holds the blocks of the longest cached
        prefix, or none without ``reuse``.

        Returns the table and the number of tokens whose state it has. That is always less than ``len(tokens)``: the
        last token must be computed, because its logits are needed. ``exclusive`` is for a request that runs alone: the
        prefix cache is emptied, and no other table may hold a block.
        """
        table = self.new_table(salt, media)
        if exclusive:
            table.exclusive = True
            self.pool.clear_keys()
        if not (self.prefix_cache and reuse) or exclusive:
            return table, 0
        columns = (len(tokens) - 1) // self.block_size
        self.extend_digests(table, tokens, columns)
        hit = self.longest_hit(table.digests[:columns], self.pool.find)
        for group in range(len(self.specs)):
            first = self.first_live_block(group, hit * self.block_size)
            table.blocks[group] += [0] * first
            for digest in table.digests[first:hit]:
                block = self.pool.find((group, digest))
                assert block is not None, "the prefix cache has every live block of a hit"
                table.blocks[group].append(block)
            self.pool.retain(table.blocks[group])
            table.first_live[group] = first
        table.cached_blocks = hit
        return table, hit * self.block_size

    def first_live_block(self, group: int, computed: int) -> int:
        """Index of the first block of a group that the token at position ``computed`` or a later one reads."""
        return self._kinds[group].first_live_block(self.specs[group], computed, self.block_size)

    def longest_hit(self, digests: Sequence[bytes], find: Callable[[tuple[int, bytes]], int | None]) -> int:
        """The number of blocks in the longest reusable prefix of these ``digests``. ``find`` returns the block of a
        key ``(group, digest)``, or None."""
        # At the end of a shorter prefix a group may read other blocks, so all groups are asked until none shortens it.
        hit, before = len(digests), -1
        while hit != before:
            before = hit
            for group, (spec, kind) in enumerate(zip(self.specs, self._kinds, strict=True)):
                cached = [find((group, digest)) is not None for digest in digests[:hit]]
                hit = longest_prefix(kind, spec, cached, self.block_size)
        return hit

    def kept(self, certain: int, right: int) -> int:
        """The number of tokens whose state exists after a step with proposed tokens. ``certain`` counts the tokens
        before these, ``right`` also the accepted ones. State per request (a recurrent row) exists after one token only:
        the last certain one."""
        return certain if any(spec.per == "request" for spec in self.specs) else right

    def grow(self, table: BlockTable, tokens: int, drafts: int = 0) -> Growth | None:
        """Add blocks to the table until it covers ``tokens`` tokens in all groups, the last ``drafts`` of which are
        proposed: a later step may begin or end at each of these. Returns None, and changes nothing, when the pool has
        too few free blocks."""
        start = len(table.blocks[0]) if table.blocks else 0
        if tokens <= start * self.block_size:
            return Growth(start, ())
        columns = range(start, -(-tokens // self.block_size))
        first_end = max(0, tokens - drafts - 1) // self.block_size
        written = [self._written_columns(group, columns, first_end) for group in range(len(self.specs))]
        taken = self.pool.allocate_all([(len(own), span) for own, span in zip(written, self.spans, strict=True)])
        if taken is None:
            return None
        parts = tuple(_spread(columns, own, new) for own, new in zip(written, taken, strict=True))
        for blocks, part in zip(table.blocks, parts, strict=True):
            blocks.extend(part)
        return Growth(start, parts)

    def _written_columns(self, group: int, columns: range, first_end: int) -> Sequence[int]:
        """Those of the new ``columns`` of a group that steps write: the others need no block. The step may end in the
        last of them, and with drafts in each from ``first_end`` on."""
        spec, kind = self.specs[group], self._kinds[group]
        # The default ``needs`` takes every block and is not called: a long prompt has thousands of them.
        if type(kind).needs is StateKind.needs:
            return columns
        last = columns[-1]
        return [at for at in columns if kind.needs(spec, at, at if at >= first_end else last, self.block_size)]

    def fork(self, table: BlockTable, computed: int) -> tuple[BlockTable, list[BlockCopy]] | None:
        """Make a second table over the same state of ``computed`` tokens. Full blocks are shared; a last block that is
        partly filled must be copied.

        Returns the table and the copies for the next plan; None when the pool has too few free blocks.
        """
        full, rest = divmod(computed, self.block_size)
        if (fresh := self.pool.allocate_all([(1 if rest else 0, span) for span in self.spans])) is None:
            return None
        cached, live = min(table.cached_blocks, full), list(table.first_live)
        copy = BlockTable(table.salt, [], live, table.digests[:full], cached, table.exclusive)
        copies = []
        for group, (blocks, last) in enumerate(zip(table.blocks, fresh, strict=True)):
            self.pool.retain(blocks[:full])
            copies += [BlockCopy(group, blocks[full], target) for target in last]
            copy.blocks.append([*blocks[:full], *last])
        return copy, copies

    def commit(self, table: BlockTable, tokens: Sequence[int], computed: int) -> None:
        """Note that the result of a step was read: the state of the first ``computed`` tokens exists and their ids are
        known. Full blocks enter the prefix cache; blocks that no later token reads go back to the pool.
        """
        if self.prefix_cache and not table.exclusive and computed // self.block_size > table.cached_blocks:
            columns = computed // self.block_size
            self.extend_digests(table, tokens, columns)
            new = range(table.cached_blocks, columns)
            for group, (spec, kind, blocks) in enumerate(zip(self.specs, self._kinds, table.blocks, strict=True)):
                whole = type(kind).reusable is StateKind.reusable
                for column in new if whole else [at for at in new if kind.reusable(spec, at, self.block_size)]:
                    block, key = blocks[column], (group, table.digests[column])
                    if block and self.pool.set_key(block, key) and self.pool.listeners:
                        self._announce(table, key, column, tokens)
            table.cached_blocks = columns
        for group in self._mortal:
            first = self.first_live_block(group, computed)
            if first > table.first_live[group]:
                blocks = table.blocks[group]
                self.pool.release(blocks[table.first_live[group] : first])
                blocks[table.first_live[group] : first] = [0] * (first - table.first_live[group])
                table.first_live[group] = first

    def _announce(self, table: BlockTable, key: tuple[int, bytes], column: int, tokens: Sequence[int]) -> None:
        first, end = column * self.block_size, (column + 1) * self.block_size
        plain = table.salt == _NO_SALT and not any(overlapping_items(table.media, 0, end))
        for listener in self.pool.listeners:
            listener.stored(key, table.digests[column - 1] if column else None, tokens[first:end], plain)

    def close(self, table: BlockTable) -> None:
        """Give back all blocks. The last ones go first, so that the beginning of a prefix is evicted last."""
        for blocks in table.blocks:
            self.pool.release(reversed(blocks))
            blocks.clear()

    def extend_digests(self, table: BlockTable, tokens: Sequence[int], columns: int) -> None:
        """Compute the cache keys of the first ``columns`` blocks of a table."""
        size, start = self.block_size, len(table.digests)
        ids = memoryview(array("i", tokens[start * size : columns * size]))
        for column, at in enumerate(range(0, len(ids), size), start):
            parent = table.digests[-1] if table.digests else table.salt
            media = overlapping_items(table.media, column * size, (column + 1) * size) if table.media else ()
            key = b"".join([parent, ids[at : at + size], *(item.key for item in media)])
            table.digests.append(hashlib.sha256(key).digest())


def _spread(columns: range, written: Sequence[int], blocks: Sequence[int]) -> tuple[int, ...]:
    """The entries of a table's ``columns``: the ``blocks`` of those that are ``written``, else the null block."""
    if len(written) == len(columns):
        return tuple(blocks)
    return tuple(map(dict(zip(written, blocks, strict=True)).get, columns, repeat(0)))


def longest_prefix(kind: StateKind, spec: StateSpec, cached: Sequence[bool], block_size: int) -> int:
    """The largest n for which all blocks that token ``n * block_size`` reads are cached. ``cached`` says for each block
    of the prefix whether it is."""
    best = run = 0
    for end, found in enumerate(cached, 1):
        run = run + 1 if found else 0
        if run >= end - kind.first_live_block(spec, end * block_size, block_size):
            best = end
    return best
