"""Block pool and state manager by themselves: references, prefix reuse and forks against a model of every block."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from evener.builtin.kinds import BUILTIN_KINDS
from evener.contracts.state import StateSpec, StateTensor
from evener.engine.controller.blocks import BlockPool
from evener.engine.controller.state import BlockTable, StateManager
from evener.errors import UnknownNameError

from .pools import take
from .traffic import patient

KINDS = {kind.name: kind for kind in BUILTIN_KINDS}
TENSORS = (StateTensor("key", (1, 2), "float32"),)
FULL = StateSpec("full", TENSORS)
RECURRENT = StateSpec("recurrent", TENSORS, per="request")
APART = StateSpec("recurrent", TENSORS, per="request", every=4)
SALTS = ("", "tenant")


def window(size: int) -> StateSpec:
    return StateSpec("window", TENSORS, window=size)


def chunk(size: int) -> StateSpec:
    return StateSpec("chunk", TENSORS, window=size)


def run(machine: type[RuleBasedStateMachine], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=patient(examples, stateful_step_count=30),
    )


class PoolModel(RuleBasedStateMachine):
    """A pool beside plain reference counts, the pages of each block, and a plain list of keys."""

    blocks = Bundle("blocks")

    @initialize(slabs=st.integers(1, 8), spans=st.sampled_from([(1,), (1,), (4, 2, 1), (6, 2, 3), (12, 1)]))
    def start(self, slabs: int, spans: tuple[int, ...]) -> None:
        self.spans, self.slab = spans, max(spans)
        self.pool = BlockPool(slabs * self.slab, self.slab)
        self.held: Counter[int] = Counter()
        self.span_of: dict[int, int] = {}
        self.keys: dict[int, str] = {}
        self.cut = [self.slab] * slabs

    def _in_use(self, slab: int) -> int:
        """Blocks of a slab that are held."""
        return sum(count > 0 and block // self.slab == slab for block, count in self.held.items())

    def _room(self, span: int) -> int:
        """Blocks of a span that can be had."""
        each = self.slab // span
        used = [(self._in_use(slab), self.cut[slab]) for slab in range(1, len(self.cut))]
        return sum(each if not held else each - held if cut == span else 0 for held, cut in used)

    @rule(target=blocks, count=st.integers(0, 4), pick=st.integers(0, 2))
    def take(self, count: int, pick: int) -> int:
        span = self.spans[pick % len(self.spans)]
        free, room = self.pool.free, self._room(span)
        found = self.pool.allocate_all([(count, span)])
        if found is None:
            assert count > room and self.pool.free == free
            return 0
        (taken,) = found
        assert len(set(taken)) == count <= room and not any(self.held[b] for b in taken)
        for block in taken:
            slab = block // self.slab
            if self.cut[slab] != span:
                assert not self._in_use(slab), "a slab in use is cut anew"
                self.keys = {b: key for b, key in self.keys.items() if b // self.slab != slab}
                self.cut[slab] = span
            assert slab > 0 and block % span == 0
            self.held[block] += 1
            self.keys.pop(block, None)
        return taken[0] if taken else 0

    @rule(block=blocks)
    def hold(self, block: int) -> None:
        if block and (self.held[block] or block in self.keys):
            self.pool.retain([block])
            self.held[block] += 1

    @rule(block=blocks)
    def release(self, block: int) -> None:
        if self.held[block]:
            self.pool.release([block, 0])
            self.held[block] -= 1

    @rule(block=blocks, key=st.sampled_from("abc"))
    def name(self, block: int, key: str) -> None:
        if self.held[block]:
            self.pool.set_key(block, key)
            if key not in self.keys.values():
                self.keys.setdefault(block, key)

    @rule()
    def forget(self) -> None:
        self.pool.clear_keys()
        self.keys.clear()

    @invariant()
    def it_is_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = sum(self.cut[block // self.slab] for block, count in self.held.items() if count > 0)
        assert self.pool.used == held and self.pool.free == self.pool.count - self.slab - held
        for block in range(self.slab, self.pool.count):
            assert (self.pool._references[block] == 0) == (self.held[block] == 0)
        by_key = {key: block for block, key in self.keys.items()}
        assert {key: self.pool.find(key) for key in "abc"} == {key: by_key.get(key) for key in "abc"}


def test_the_block_pool_counts_references_and_remembers_keys_until_a_block_is_given_out_again() -> None:
    run(PoolModel, 50)


def test_a_block_with_a_known_prefix_is_given_out_after_those_without_one() -> None:
    pool = BlockPool(5)
    first, second, third, fourth = take(pool, 4)
    pool.set_key(first, "a")
    pool.set_key(second, "b")
    pool.release([first, third, second, fourth])
    assert set(take(pool, 2)) == {third, fourth}
    assert take(pool, 1) == [first], "the least recently used prefix goes first"
    assert pool.find("a") is None and pool.find("b") == second


def test_releasing_an_unreferenced_block_is_an_assertion_error() -> None:
    pool = BlockPool(3)
    (block,) = take(pool, 1)
    pool.release([block])
    with pytest.raises(AssertionError, match="more often than it was taken"):
        pool.release([block])


@dataclass(eq=False)
class Sequence:
    """A sequence whose state lives in a table."""

    table: BlockTable
    salt: str
    tokens: list[int]
    computed: int
    done: bool = field(default=False)


class StateModel(RuleBasedStateMachine):
    """Sequences that are opened, extended, forked and closed; content of blocks as prefixes."""

    sequences = Bundle("sequences")

    @initialize(
        specs=st.lists(
            st.one_of(
                st.just(FULL),
                st.integers(1, 9).map(window),
                st.integers(1, 9).map(chunk),
                st.sampled_from([RECURRENT, APART]),
            ),
            min_size=1,
            max_size=3,
        ),
        block_size=st.sampled_from([1, 2, 4]),
        blocks=st.integers(4, 60),
        prefix_cache=st.sampled_from([True, True, False]),
        cuts=st.sampled_from([(1, 1, 1), (1, 1, 1), (1, 2, 6), (4, 1, 4)]),
    )
    def start(
        self, specs: list[StateSpec], block_size: int, blocks: int, prefix_cache: bool, cuts: tuple[int, ...]
    ) -> None:
        self.state = StateManager(specs, KINDS, block_size, blocks, prefix_cache, cuts[: len(specs)])
        self.live: list[Sequence] = []
        self.content: dict[tuple[int, int], tuple[int, str, tuple[int, ...]]] = {}

    @rule(target=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), salt=st.sampled_from(SALTS))
    def open(self, tokens: list[int], salt: str) -> Sequence:
        table, cached = self.state.open(tokens, salt)
        assert 0 <= cached < len(tokens) and cached % self.state.block_size == 0
        sequence = Sequence(table, salt, tokens, cached)
        self.live.append(sequence)
        self._check_reads(sequence)
        return sequence

    @rule(sequence=sequences, more=st.lists(st.integers(0, 1), max_size=6), step=st.integers(1, 9))
    def extend(self, sequence: Sequence, more: list[int], step: int) -> None:
        if sequence.done:
            return
        sequence.tokens = sequence.tokens + more
        end = min(len(sequence.tokens), sequence.computed + step)
        free, before = self.state.pool.free, [list(b) for b in sequence.table.blocks]
        growth = self.state.grow(sequence.table, end)
        if growth is None:
            assert self.state.pool.free == free and sequence.table.blocks == before
            return
        for group, (old, new) in enumerate(zip(before, sequence.table.blocks, strict=True)):
            assert new == old + list(growth.blocks[group] if growth.blocks else ()) and growth.start == len(old)
        for position in range(sequence.computed, end):
            self._write(sequence, position, end)
        sequence.computed = end
        self.state.commit(sequence.table, sequence.tokens, end)
        self._check_reads(sequence)

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: Sequence) -> Sequence:
        free = self.state.pool.free
        made = None if sequence.done else self.state.fork(sequence.table, sequence.computed)
        if made is None:
            assert sequence.done or self.state.pool.free == free
            assert sequence.done or free < self.state.pool.slab * len(self.state.specs)
            return sequence
        table, copies = made
        assert len(copies) == (len(self.state.specs) if sequence.computed % self.state.block_size else 0)
        for copy in copies:
            for offset in range(self.state.block_size):
                self.content.pop((copy.target, offset), None)
                if (copy.source, offset) in self.content:
                    self.content[copy.target, offset] = self.content[copy.source, offset]
        twin = Sequence(table, sequence.salt, list(sequence.tokens[: sequence.computed]), sequence.computed)
        self.live.append(twin)
        self._check_reads(twin)
        return twin

    @rule(sequence=consumes(sequences))
    def close(self, sequence: Sequence) -> None:
        if not sequence.done:
            self.state.close(sequence.table)
            self.live.remove(sequence)
            sequence.done = True

    def _prefix(self, sequence: Sequence, group: int, position: int) -> tuple[int, str, tuple[int, ...]]:
        return (group, sequence.salt, tuple(sequence.tokens[: position + 1]))

    def _write(self, sequence: Sequence, position: int, end: int) -> None:
        column, offset = divmod(position, self.state.block_size)
        for group, spec in enumerate(self.state.specs):
            if spec.per == "request" and (position + 1) % (spec.every or self.state.block_size) and position + 1 < end:
                continue  # a row is kept at snapshots and after the last token
            block = sequence.table.blocks[group][column]
            assert block and self.state.pool._keys[block] is None, "a block that can be found is overwritten"
            others = [s for s in self.live if s is not sequence and any(block in blocks for blocks in s.table.blocks)]
            assert not others, f"block {block} is written and belongs to another sequence"
            self.content[block, 0 if spec.per == "request" else offset] = self._prefix(sequence, group, position)

    def _check_reads(self, sequence: Sequence) -> None:
        """The token at ``computed`` finds all that it reads."""
        for group, spec in enumerate(self.state.specs):
            if spec.per == "request":
                positions = range(max(0, sequence.computed - 1), sequence.computed)
            elif spec.kind == "chunk":
                positions = range(sequence.computed // (spec.window or 0) * (spec.window or 0), sequence.computed)
            else:
                positions = range(max(0, sequence.computed - (spec.window or 10**6) + 1), sequence.computed)
            for position in positions:
                column, offset = divmod(position, self.state.block_size)
                block = sequence.table.blocks[group][column]
                held = self.content.get((block, 0 if spec.per == "request" else offset))
                assert block and held == self._prefix(sequence, group, position)

    @invariant()
    def references_are_the_tables_own(self) -> None:
        if not hasattr(self, "state"):
            return
        state = self.state
        held: Counter[int] = Counter()
        pages: dict[int, set[int]] = {}
        for sequence in self.live:
            for blocks, span in zip(sequence.table.blocks, state.spans, strict=True):
                held.update(b for b in blocks if b)
                pages.update((b, set(range(b, b + span))) for b in blocks if b)
        assert state.pool.used == sum(map(len, pages.values())) == len(set().union(*pages.values(), set()))
        assert all(state.pool._references[b] == held[b] for b in range(1, state.pool.count))

    def teardown(self) -> None:
        if hasattr(self, "state"):
            for sequence in self.live:
                self.state.close(sequence.table)
            assert self.state.pool.used == 0


def test_sequences_that_grow_fork_and_close_read_their_own_state_only() -> None:
    run(StateModel, 50)


@pytest.mark.slow
def test_many_sequences_that_grow_fork_and_close_read_their_own_state_only() -> None:
    run(StateModel, 1500)
    run(PoolModel, 1000)


def test_a_window_keeps_only_the_blocks_that_the_next_token_reads() -> None:
    state = StateManager([FULL, window(8)], KINDS, 4, 60)
    table, _ = state.open([1] * 90, "")
    for end in range(10, 91, 10):
        assert state.grow(table, end) is not None
        state.commit(table, [1] * 90, end)
    held = [sum(b > 0 for b in blocks) for blocks in table.blocks]
    assert held == [23, 3] and state.pool.used == 26


def test_a_chunk_frees_what_came_before_it_and_a_prefix_that_ends_in_it_needs_its_blocks_alone() -> None:
    state = StateManager([FULL, chunk(12)], KINDS, 4, 90)
    prompt = list(range(30))
    table, _ = state.open(prompt, "")
    live = []
    for end in (7, 12, 13, 24, 30):
        assert state.grow(table, end) is not None
        state.commit(table, prompt, end)
        live.append([column for column, block in enumerate(table.blocks[1]) if block])
    # A chunk that ends with the step is freed with it: the next token is in another.
    assert live == [[0, 1], [], [3], [], [6, 7]]
    twin, cached = state.open([*prompt[:29], 77], "")
    assert cached == 28 and [column for column, block in enumerate(twin.blocks[1]) if block] == [6]
    state.close(table)
    state.close(twin)
    assert state.pool.used == 0


def test_an_unknown_state_kind_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"state kind 'recurent'; did you mean 'recurrent'\?"):
        StateManager([StateSpec("recurent", TENSORS)], KINDS, 4, 10)
