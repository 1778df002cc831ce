"""Which tokens have state of what drafts: it need not compute a token because the model does.

The worker learns of blocks and texts by plans alone, so all ranks count alike. A slot's count says how many leading
tokens of its text have such state; a block's count says the same of the tokens in it, because a later request may find
the block in the prefix cache, share it as a fork, or get it back from where a connector kept it. Proposed tokens count
as soon as they are computed. The next row of their slot starts behind the last right one, and takes the others back. No
block enters the prefix cache in between, and no fork starts behind that token.
"""

from __future__ import annotations

from collections.abc import Iterable

from evener.contracts.connector import BlockMoves
from evener.engine.wire.plan import Plan
from evener.engine.wire.slabs import find_kinds
from evener.engine.worker.assembly import Assembly


class ComputedTokens:
    """Counts, by slot and by block.

    Args:
        a: the model's assembly.
        groups: indices of the state groups with layers of what drafts.
        brought: whether blocks that a connector brings are taken to have such state, if this worker did not see them
            leave. It can make proposals worse, and no answer wrong.

    Attributes:
        drops: whether one of these groups frees blocks of earlier tokens.
    """

    def __init__(self, a: Assembly, groups: Iterable[int], brought: bool) -> None:
        self._size, self._groups = a.geometry.block_size, tuple(groups)
        specs = [a.geometry.groups[index].spec for index in self._groups]
        self._rules = list(zip(specs, find_kinds(specs, a.kinds), strict=True))
        self.drops = any(first > 0 for first in self._first_live(a.config.max_seq_len))
        self._unseen = self._size if brought else 0
        self._blocks: dict[int, list[list[int]]] = {}
        self._lengths: dict[int, int] = {}
        self._in_block: dict[int, int] = {}
        self._in_place: dict[tuple[int, int], int] = {}

    def length(self, slot: int) -> int:
        """How many leading tokens of a slot's text have the state."""
        return self._lengths[slot]

    def reaches(self, slot: int, start: int) -> bool:
        """Whether the tokens that lack it can be computed, if the model goes on at ``start``: what the first of them
        reads must not be freed. The slot's entries for freed blocks may name those of other requests by now."""
        return self._first_live(self._lengths[slot]) == self._first_live(start)

    def _first_live(self, computed: int) -> list[int]:
        return [kind.first_live_block(spec, computed, self._size) for spec, kind in self._rules]

    def apply(self, plan: Plan) -> None:
        """Note what a plan changes before its rows run."""
        if plan.moves is not None:
            self._move(plan.moves)
        starts = dict(zip(plan.slots, plan.starts, strict=True))
        admitted = [admission.slot for admission in plan.admissions]
        self._blocks.update({slot: [[] for _ in self._groups] for slot in admitted})
        for update in plan.updates:
            # All but a new request's first blocks, which the prefix cache had or a fork shares, are fresh.
            kept = starts[update.slot] // self._size if update.slot in admitted else 0
            for blocks, index in zip(self._blocks[update.slot], self._groups, strict=True):
                blocks[update.start :] = update.blocks[index]
                for block in update.blocks[index][kept:]:
                    self._in_block.pop(block, None)
        for copy in plan.copies:
            if copy.group in self._groups:
                self._in_block[copy.target] = self._in_block.get(copy.source, 0)
        for slot in admitted:
            self._lengths[slot] = min(map(self._leading, self._blocks[slot]))
        for slot, start in starts.items():
            if self._lengths[slot] > start:
                self._cut(slot, start)

    def _move(self, moves: BlockMoves) -> None:
        for move in moves.out:
            self._in_place[move.group, move.place] = self._in_block.get(move.block, 0)
        for transfer in moves.back:
            for move in transfer.moves:
                self._in_block[move.block] = self._in_place.get((move.group, move.place), self._unseen)

    def _leading(self, blocks: list[int]) -> int:
        for column, block in enumerate(blocks):
            # The null block stands for tokens that nothing reads any more.
            if block and (count := self._in_block.get(block, 0)) < self._size:
                return column * self._size + count
        return len(blocks) * self._size

    def _cut(self, slot: int, length: int) -> None:
        self._lengths[slot], first = length, length // self._size
        for blocks in self._blocks[slot]:
            for column, block in enumerate(blocks[first:], first):
                if block:
                    self._in_block[block] = min(self._in_block.get(block, 0), max(0, length - column * self._size))

    def extend(self, slot: int, length: int) -> None:
        """Note that the tokens behind those that have the state get it, up to ``length``."""
        first, stop = self._lengths[slot] // self._size, -(-length // self._size)
        for blocks in self._blocks[slot]:
            for column in range(first, stop):
                if block := blocks[column]:
                    count = min(self._size, length - column * self._size)
                    self._in_block[block] = max(count, self._in_block.get(block, 0))
        self._lengths[slot] = length
