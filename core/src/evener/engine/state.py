"""The state manager: block tables of requests over all state groups, prefix reuse and dead blocks. It never looks
inside a block.

Groups differ only in which blocks are still needed (``StateKind``). A prefix of n blocks can be reused if every group
still has the blocks that the next token can read; what a group has passed is given back as soon as the step that passed
it is read.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from evener.contracts.media import MediaItem
from evener.contracts.state import StateKind, StateSpec
from evener.engine.blocks import BlockPool
from evener.errors import UnknownNameError
from evener.media.items import touched


@dataclass
class BlockTable:
    """One request's blocks: for each group a list of block ids, 0 where a block is dead or was never needed.

    ``alone``: its state is neither found nor reused, because the pool must stay in one piece for it. ``media`` stand
    for some of its tokens.
    """

    salt: bytes
    blocks: list[list[int]]
    dead: list[int]
    digests: list[bytes] = field(default_factory=list)
    named: int = 0
    alone: bool = False
    media: Sequence[MediaItem] = ()

    def columns(self) -> int:
        """Blocks that the table covers."""
        return len(self.blocks[0]) if self.blocks else 0


@dataclass(frozen=True)
class Growth:
    """New entries of a table: from column ``start`` on, ids for each group."""

    start: int
    blocks: tuple[tuple[int, ...], ...]


class StateManager:
    """Hands out blocks of one pool to the tables of requests.

    Args:
        specs: one a group.
        kinds: registered kinds by name.
        block_size: tokens a block.
        blocks: slabs in the pool, each as large as the largest block of a group, the null one included.
        prefix_cache: whether computed blocks can be found again.
        cuts: for each group how many of its blocks a slab holds; default: one each.
    """

    def __init__(
        self,
        specs: Sequence[StateSpec],
        kinds: Mapping[str, StateKind],
        block_size: int,
        blocks: int,
        prefix_cache: bool = True,
        cuts: Sequence[int] = (),
    ) -> None:
        for spec in specs:
            if spec.kind not in kinds:
                raise UnknownNameError("state kind", spec.kind, kinds, "Install the package that registers it.")
        self.specs = tuple(specs)
        self.block_size = block_size
        self.cuts = tuple(cuts) or (1,) * len(self.specs)
        slab = math.lcm(*self.cuts)
        self.spans = tuple(slab // cut for cut in self.cuts)
        self.blocks, self.pool = blocks, BlockPool(blocks * slab, slab)
        self.prefix_cache = prefix_cache
        self._kinds = tuple(kinds[spec.kind] for spec in specs)

    def blocks_for(self, tokens: int, step_tokens: int) -> int:
        """Slabs that one request of ``tokens`` tokens can hold at most, when a step adds at most ``step_tokens``."""
        # A window of w tokens touches one block more at some ends than at others, a step passes one snapshot more: the
        # last block's or snapshot's worth of ends is looked at.
        held: dict[int, int] = {}
        for spec, kind, span in zip(self.specs, self._kinds, self.spans, strict=True):
            ends = range(max(1, tokens - (spec.every or self.block_size) + 1), tokens + 1)
            held[span] = held.get(span, 0) + max(self._held(kind, spec, end, step_tokens) for end in ends)
        return sum(self.pool.slabs_for(count, span) for span, count in held.items())

    def _held(self, kind: StateKind, spec: StateSpec, end: int, step_tokens: int) -> int:
        """Blocks of one group after a step of ``step_tokens`` tokens up to ``end``, before it is read."""
        first = kind.first_live_block(spec, max(0, end - step_tokens), self.block_size)
        return kind.held(spec, first, -(-end // self.block_size), self.block_size)

    def open(
        self, tokens: Sequence[int], salt: str, alone: bool = False, reuse: bool = True,
        media: Sequence[MediaItem] = (),
    ) -> tuple[BlockTable, int]:  # fmt: skip
        """A table for a request whose known tokens are ``tokens``, with the longest cached prefix held in it; none
        without ``reuse``.

        Returns the table and how many tokens of state it has; always fewer than ``len(tokens)``, so that something is
        computed. ``alone``: without a prefix, and nobody's prefix is kept; nobody else may hold a block.
        """
        table = BlockTable(hashlib.sha256(salt.encode()).digest(), [[] for _ in self.specs], [0] * len(self.specs))
        table.media = media
        if alone:
            table.alone = True
            self.pool.forget_all()
        if not (self.prefix_cache and reuse) or alone:
            return table, 0
        columns = (len(tokens) - 1) // self.block_size
        self._extend_digests(table, tokens, columns)
        hit = self._longest_hit(table.digests, columns)
        del table.digests[hit:]
        for group, (spec, kind) in enumerate(zip(self.specs, self._kinds, strict=True)):
            first = kind.first_live_block(spec, hit * self.block_size, self.block_size)
            for column in range(hit):
                block = self.pool.find((group, table.digests[column])) if column >= first else 0
                assert block is not None, "a hit covers every live block"
                if block:
                    self.pool.hold(block)
                table.blocks[group].append(block)
            table.dead[group] = first
        table.named = hit
        return table, hit * self.block_size

    def _longest_hit(self, digests: Sequence[bytes], columns: int) -> int:
        hit, before = columns, -1
        while hit != before:
            before = hit
            for group, (spec, kind) in enumerate(zip(self.specs, self._kinds, strict=True)):
                cached = [self.pool.find((group, digest)) is not None for digest in digests[:hit]]
                hit = longest_prefix(kind, spec, cached, self.block_size)
        return hit

    def grow(self, table: BlockTable, tokens: int) -> Growth | None:
        """Make room for state of ``tokens`` tokens in all groups; None (and nothing changed) when the pool cannot."""
        start = table.columns()
        count = -(-tokens // self.block_size) - start
        if count <= 0:
            return Growth(start, ())
        columns = range(start, start + count)
        needs = [
            [kind.needs(spec, column, columns[-1], self.block_size) for column in columns]
            for spec, kind in zip(self.specs, self._kinds, strict=True)
        ]
        taken = self.pool.take_all([(sum(group), span) for group, span in zip(needs, self.spans, strict=True)])
        if taken is None:
            return None
        fresh = map(iter, taken)
        parts = tuple(
            tuple(next(blocks) if needed else 0 for needed in group) for blocks, group in zip(fresh, needs, strict=True)
        )
        for blocks, new in zip(table.blocks, parts, strict=True):
            blocks.extend(new)
        return Growth(start, parts)

    def fork(self, table: BlockTable, computed: int) -> tuple[BlockTable, list[tuple[int, int, int]]] | None:
        """A second table over the same state of ``computed`` tokens: full blocks are shared, a partial last one is to
        be copied.

        Returns the table and the copies ``(group, source, target)`` that the next plan must make; None when the pool
        cannot.
        """
        full, rest = divmod(computed, self.block_size)
        fresh = self.pool.take_all([(1 if rest else 0, span) for span in self.spans])
        if fresh is None:
            return None
        copy = BlockTable(
            table.salt, [], list(table.dead), table.digests[:full], min(table.named, full), table.alone
        )  # fmt: skip
        copies = []
        for group, blocks in enumerate(table.blocks):
            shared = blocks[:full]
            for block in shared:
                if block:
                    self.pool.hold(block)
            if rest:
                copies.append((group, blocks[full], fresh[group][0]))
                shared = [*shared, fresh[group][0]]
            copy.blocks.append(shared)
        return copy, copies

    def commit(self, table: BlockTable, tokens: Sequence[int], computed: int) -> None:
        """State of the first ``computed`` tokens was computed by a step that has been read, and their ids are known.

        Full blocks become findable; blocks that no later token reads are given back.
        """
        if self.prefix_cache and not table.alone and computed // self.block_size > table.named:
            columns = computed // self.block_size
            self._extend_digests(table, tokens, columns)
            for group, (spec, kind, blocks) in enumerate(zip(self.specs, self._kinds, table.blocks, strict=True)):
                for column in range(table.named, columns):
                    if blocks[column] and kind.reusable(spec, column, self.block_size):
                        self.pool.name(blocks[column], (group, table.digests[column]))
            table.named = columns
        for group, (spec, kind) in enumerate(zip(self.specs, self._kinds, strict=True)):
            first = kind.first_live_block(spec, computed, self.block_size)
            if first > table.dead[group]:
                blocks = table.blocks[group]
                self.pool.release(blocks[table.dead[group] : first])
                blocks[table.dead[group] : first] = [0] * (first - table.dead[group])
                table.dead[group] = first

    def close(self, table: BlockTable) -> None:
        """Give back everything. Later blocks first, so that a prefix's beginning is evicted last."""
        for blocks in table.blocks:
            self.pool.release(reversed(blocks))
            blocks.clear()

    def _extend_digests(self, table: BlockTable, tokens: Sequence[int], columns: int) -> None:
        size = self.block_size
        for column in range(len(table.digests), columns):
            parent = table.digests[-1] if table.digests else table.salt
            first, end = column * size, (column + 1) * size
            keys = [item.key for item in touched(table.media, first, end)]
            key = b"".join([parent, array("i", tokens[first:end]).tobytes(), *keys])
            table.digests.append(hashlib.sha256(key).digest())


def longest_prefix(kind: StateKind, spec: StateSpec, cached: Sequence[bool], block_size: int) -> int:
    """The largest n such that all of the first n blocks that token ``n * block_size`` can read are cached."""
    best = run = 0
    for end, found in enumerate(cached, 1):
        run = run + 1 if found else 0
        if run >= end - kind.first_live_block(spec, end * block_size, block_size):
            best = end
    return best
