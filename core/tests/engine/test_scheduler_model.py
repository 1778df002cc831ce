"""Scheduler and state manager against a model of the device: who wrote whose state into which block, and who reads it.

The simulated device keeps, for each block, the keys of the prefixes whose state was written there. A key names (salt,
all tokens up to a position), so a read of anything but the reader's own prefix is seen at once, whatever went wrong: a
block handed out twice, freed early, found under a wrong key, a missing table entry or a copy that was not made.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from evener.builtin.kinds import BUILTIN_KINDS
from evener.contracts.generation.drafter import Drafter
from evener.contracts.state import StateSpec, StateTensor
from evener.engine.controller.controller import Controller
from evener.engine.controller.request import Request
from evener.engine.controller.scheduler import Scheduler
from evener.engine.controller.state import BlockTable, Growth, StateManager
from evener.engine.wire.executor import Executor
from evener.engine.wire.messages import Abort, Finish, Finished, FromController, NewRequest, Sampling, Tokens
from evener.engine.wire.plan import StepResult
from evener_generation.drafting.speculation import Speculation
from evener_kv.host_blocks import HostBlocks

from .traffic import patient

KINDS = {kind.name: kind for kind in BUILTIN_KINDS}
TENSORS = (StateTensor("key", (1, 2), "float32"),)
FULL = StateSpec("full", TENSORS)
RECURRENT = StateSpec("recurrent", TENSORS, per="request")
APART = StateSpec("recurrent", TENSORS, per="request", every=4)
VOCABULARY = 4


def window(size: int) -> StateSpec:
    return StateSpec("window", TENSORS, window=size)


def key_of(salt: object, tokens: Sequence[int]) -> int:
    """Names the state after ``tokens``."""
    key = hash(("salt", salt))
    for token in tokens:
        key = hash((key, token))
    return key


def next_token(key: int) -> int:
    """The model: a token that depends on everything before it."""
    return key // 7 % VOCABULARY


def answer(message: NewRequest) -> list[int]:
    """What a request gets when nothing is in its way."""
    key, found = key_of(message.cache_salt, message.prompt), []
    while len(found) < message.max_tokens:
        found.append(next_token(key))
        if found[-1] in message.stop_token_ids:
            break
        key = hash((key, found[-1]))
    return found


class RightAtTimes(Drafter):
    """Proposes the model's answer for requests without a salt, with some mistakes."""

    def __init__(self) -> None:
        self.key = hash(("salt", ""))

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.key = hash((self.key, token))

    def propose(self, count: int) -> Sequence[int]:
        key, found = self.key, []
        while len(found) < count - self.key % 2:
            wrong = key // 11 % 5 == 0
            found.append((next_token(key) + wrong) % VOCABULARY)
            key = hash((key, found[-1]))
        return found


class SimulatedDevice(Executor):
    """Runs plans in order on rows of keys, and checks every read and every write."""

    def __init__(self, state: StateManager) -> None:
        self.state = state
        self.scheduler: Scheduler
        self.tokens: dict[int, list[int]] = {}
        self.keys: dict[int, list[int]] = {}
        self.tables: dict[int, list[dict[int, int]]] = {}
        self.content: dict[tuple[int, int], int] = {}
        self.owners: dict[int, tuple[int, int]] = {}
        self.results: deque[StepResult] = deque()
        self.touched: deque[set[int]] = deque()
        #: What host memory holds, page by page; transfers that are under way, and the plan that began each.
        self.host: dict[int, tuple[int, dict[int, Any]]] = {}
        self.transfers: dict[int, tuple[int, list[tuple[int, int, dict[int, Any]]]]] = {}
        self.delay = 0
        self.stored = self.loaded = 0

    def submit(self, plan: Any) -> None:
        requests = {r.slot: r for r in self.scheduler.running}
        if plan.moves is not None:
            self._move(plan)
        for a in plan.admissions:
            self.tokens[a.slot] = list(a.tokens)
            self.keys[a.slot] = [hash(("salt", requests[a.slot].message.cache_salt))]
            self.tables[a.slot] = [{} for _ in self.state.specs]
        for u in plan.updates:
            for table, blocks in zip(self.tables[u.slot], u.blocks, strict=True):
                table.update(enumerate(blocks, u.start))
        assert len(set(plan.slots)) == len(plan.slots), "a request has one row a step"
        assert sum(plan.counts) <= self.scheduler.step_tokens
        self.touched.append(set())
        for copy in plan.copies:
            self._copy(copy.group, copy.source, copy.target)
        drafts = {draft.row: draft.ids for draft in plan.drafts}
        for index, (slot, start, count) in enumerate(zip(plan.slots, plan.starts, plan.counts, strict=True)):
            assert start + count < requests[slot].limit, "a length limit is planned, never overrun"
            if index in plan.samples:
                # Behind the certain tokens there may be some that were sampled behind wrong drafts.
                self._overwrite(slot, start + count - len(drafts.get(index, ())), drafts.get(index, []))
            self._run_row(slot, start, count, len(drafts.get(index, ())))
        ids = []
        for index, (slot, start, count) in enumerate(zip(plan.slots, plan.starts, plan.counts, strict=True)):
            if sampled := plan.samples.count(index):
                assert sampled == 1 + len(drafts.get(index, ())) and len(self.tokens[slot]) == start + count
                first = start + count + 1 - sampled
                found = [next_token(self._key(slot, end)) for end in range(first, start + count + 1)]
                self._overwrite(slot, first, found)
                ids += found
        assert plan.samples == sorted(plan.samples)
        self.results.append(StepResult(plan=plan.id, ids=ids))

    def read(self) -> StepResult:
        self.touched.popleft()
        result = self.results.popleft()
        over = [name for name, (begun, _) in self.transfers.items() if begun + self.delay <= result.plan]
        self._finish(over)
        return msgspec.structs.replace(result, transfers=over)

    def _move(self, plan: Any) -> None:
        """Copy what leaves at once, and what comes back as late as it may: when it is waited for, or was reported."""
        self._finish(plan.moves.waits)
        spans = [(move.place, move.place + self.state.spans[move.group]) for move in plan.moves.out]
        written = [page for first, end in spans for page in range(first, end)]
        assert len(written) == len(set(written)), "ranks may make these copies in any order"
        for move in plan.moves.out:
            copy = {at: self.content[move.block, at] for at in range(self.state.block_size)
                    if (move.block, at) in self.content}  # fmt: skip
            pages = range(move.place, move.place + self.state.spans[move.group])
            self.host.update(dict.fromkeys(pages, (move.place, copy)))
            self.stored += 1
        for transfer in plan.moves.back:
            rows = []
            for move in transfer.moves:
                pages = range(move.place, move.place + self.state.spans[move.group])
                (place,) = {self.host[page][0] for page in pages}
                assert place == move.place, "the place was given to another block"
                rows.append((move.group, self.wrong_block(move.block), self.host[place][1]))
                self.loaded += 1
            self.transfers[transfer.id] = (plan.id, rows)
        self._finish(plan.moves.waits)

    def wrong_block(self, block: int) -> int:
        """The block that is written to; a test plants a fault here."""
        return block

    def _finish(self, transfers: Sequence[int]) -> None:
        for name in transfers:
            for group, block, copy in self.transfers.pop(name, (0, []))[1]:
                self._claim(group, block)
                for at in range(self.state.block_size):
                    self.content.pop((block, at), None)
                self.content.update({(block, at): key for at, key in copy.items()})

    def _overwrite(self, slot: int, start: int, ids: Sequence[int]) -> None:
        """The slot's tokens from position ``start`` on are these."""
        self.tokens[slot][start:] = ids
        del self.keys[slot][start + 1 :]

    def _key(self, slot: int, length: int) -> int:
        """Key of the slot's first ``length`` tokens."""
        keys = self.keys[slot]
        while len(keys) <= length:
            keys.append(hash((keys[-1], self.tokens[slot][len(keys) - 1])))
        return keys[length]

    def _run_row(self, slot: int, start: int, count: int, drafts: int) -> None:
        """Writes precede reads inside a layer, as in the real step; a recurrent row is read before it goes on, and kept
        behind the last certain token."""
        for group, spec in enumerate(self.state.specs):
            if spec.per == "request":
                if start:
                    self._expect(slot, group, start - 1, 0)
                every = spec.every or self.state.block_size
                kept = start + count - drafts
                for end in range(start + 1, kept + 1):
                    if end % every == 0 or end == kept:
                        self._write(slot, group, end - 1, 0)
                continue
            for position in range(start, start + count):
                self._write(slot, group, position, position % self.state.block_size)
            first = 0 if spec.window is None else max(0, start - spec.window + 1)
            for position in range(first, start + count):
                self._expect(slot, group, position, position % self.state.block_size)

    def _block(self, slot: int, group: int, position: int) -> int:
        block = self.tables[slot][group].get(position // self.state.block_size, 0)
        assert block, f"slot {slot} has no block of group {group} for position {position}"
        self.touched[-1].add(block)
        return block

    def _expect(self, slot: int, group: int, position: int, offset: int) -> None:
        block = self._block(slot, group, position)
        assert self.content.get((block, offset)) == (group, self._key(slot, position + 1)), (
            f"block {block} does not hold what slot {slot} reads at position {position} of group {group}"
        )

    def _copy(self, group: int, source: int, target: int) -> None:
        assert self.state.pool._references[target] == 1 and self.state.pool._keys[target] is None
        self.touched[-1] |= {source, target}
        self._claim(group, target)
        for at in range(self.state.block_size):
            if (source, at) in self.content:
                self.content[target, at] = self.content[source, at]

    def _write(self, slot: int, group: int, position: int, offset: int) -> None:
        block = self._block(slot, group, position)
        holders = [
            r
            for r in (*self.scheduler.running, *self.scheduler._pending_release)
            if r.slot != slot and r.table is not None and any(block in blocks for blocks in r.table.blocks)
        ]
        assert not holders, f"block {block} is written by slot {slot} and held by {[r.id for r in holders]}"
        assert self.state.pool._keys[block] is None, f"block {block} is written though it can be found by its key"
        self._claim(group, block)
        self.content[block, offset] = (group, self._key(slot, position + 1))

    def _claim(self, group: int, block: int) -> None:
        own = (block, self.state.spans[group])
        for page in range(block, sum(own)):  # whoever had these bytes has lost them
            other = self.owners.get(page, own)
            if other != own and self.owners[other[0]] == other:
                for at in range(self.state.block_size):
                    self.content.pop((other[0], at), None)
        self.owners.update(dict.fromkeys(range(block, sum(own)), own))


class Harness:
    """A controller over the simulated device, and what every request got."""

    def __init__(
        self,
        specs: Sequence[StateSpec],
        *,
        block_size: int = 2,
        blocks: int = 40,
        depth: int = 2,
        max_requests: int = 3,
        step_tokens: int = 5,
        prefix_cache: bool = True,
        cuts: Sequence[int] = (),
        drafts: int = 0,
        host: int = 0,
        delay: int = 0,
        device: type[SimulatedDevice] = SimulatedDevice,
    ) -> None:
        self.state = StateManager(specs, KINDS, block_size, blocks, prefix_cache, cuts[: len(specs)])
        self.device = device(self.state)
        self.device.delay = delay
        self.host = HostBlocks(self.state, host) if host else None
        self.scheduler = self.device.scheduler = Scheduler(
            self.state, max_requests, step_tokens,
            drafts=Speculation(RightAtTimes, drafts, max_requests + drafts, VOCABULARY) if drafts else None,
            connector=self.host,
        )  # fmt: skip
        self.controller = Controller(self.scheduler, self.device, depth)
        self.max_requests = max_requests
        self.messages: dict[str, NewRequest] = {}
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, list[Finished]] = {}

    def send(self, message: NewRequest | Abort | Finish) -> None:
        if isinstance(message, NewRequest):
            self.messages[message.id] = message
            self.outputs[message.id], self.reasons[message.id] = [], []
        self._see(self.controller.handle([message]))

    def step(self) -> None:
        before = (self.scheduler.open, self.scheduler._next_plan, self.scheduler.in_flight)
        self._see(self.controller.step())
        after = (self.scheduler.open, self.scheduler._next_plan, self.scheduler.in_flight)
        assert self.controller.idle or before != after, "nothing is under way and yet requests are open"

    def _see(self, events: Sequence[FromController]) -> None:
        for event in events:
            if isinstance(event, Tokens):
                assert not self.reasons[event.id], "tokens after the terminal event"
                self.outputs[event.id] += event.ids
            else:
                assert isinstance(event, Finished)
                self.reasons[event.id].append(event)

    def run(self) -> int:
        """Step until idle; returns the steps."""
        work = sum(len(m.prompt) + m.max_tokens for m in self.messages.values())
        bound = 20 + 4 * work * (1 + len(self.messages))
        for steps in range(bound):
            if self.controller.idle:
                return steps
            self.step()
        raise AssertionError(f"{self.scheduler.open} requests are open after {bound} steps")

    def check_blocks(self) -> None:
        """Reference counts are the tables' own, and nothing else is held."""
        held: Counter[int] = Counter()
        spans: dict[int, int] = {}
        for request in (*self.scheduler.running, *self.scheduler._pending_release):
            assert request.table is not None
            for group, blocks in enumerate(request.table.blocks):
                assert len(blocks) == len(request.table.blocks[0])
                live = blocks[request.table.first_live[group] :]
                if self.state.specs[group] == APART:
                    live = [block for block in live if block]
                assert 0 not in live and not any(blocks[: request.table.first_live[group]])
                held.update(live)
                spans.update(dict.fromkeys(live, self.state.spans[group]))
        pool = self.state.pool
        for load in self.host._loads.values() if self.host is not None else ():
            held.update(load.blocks)
            spans.update({block: pool._spans[block // pool.slab] for block in load.blocks})
        pages = [page for block, span in spans.items() for page in range(block, block + span)]
        assert len(pages) == len(set(pages)), "two blocks lie over each other"
        assert pool.used == len(pages) and pool.used + pool.free == pool.count - pool.slab
        assert all(pool._references[block] == held[block] for block in range(pool.slab, pool.count))
        assert not any(pool._references[block] == 0 for touched in self.device.touched for block in touched), (
            "a plan in flight uses a block that was given back"
        )

    def check_answers(self, cut: Sequence[str] = ()) -> None:
        """One terminal event each, and the tokens of an undisturbed run; those ``cut`` short a beginning of them."""
        for name, message in self.messages.items():
            (end,) = self.reasons[name]
            expected = answer(message)
            if end.reason == "error":
                assert end.status == 400 and not self.outputs[name]
            elif name in cut and self.outputs[name] != expected:
                assert end.reason in ("abort", "stop") and self.outputs[name] == expected[: len(self.outputs[name])]
            else:
                assert self.outputs[name] == expected
                if name not in cut:
                    assert end.reason == ("stop" if expected[-1] in message.stop_token_ids else "length")

    def check_all_given_back(self) -> None:
        assert self.controller.idle and self.state.pool.used == 0
        assert not self.scheduler.running and not self.scheduler.waiting and not self.scheduler._pending_release
        assert len(self.scheduler._slots) == self.max_requests


KIND = st.one_of(st.just(FULL), st.integers(1, 9).map(window), st.sampled_from([RECURRENT, APART]))
GROUPS = st.lists(KIND, min_size=1, max_size=3)
#: Blocks of each group in a slab; the pool of most models has one size.
CUTS = st.one_of(st.just([1, 1, 1]), st.permutations([1, 2, 6]), st.permutations([1, 4, 4]), st.just([2, 1, 3]))
PREFIXES = ([], [1, 2, 3, 0, 1, 2, 3, 0], [1, 2, 3, 0, 1], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])


class Traffic(RuleBasedStateMachine):
    """Random arrivals, forks, aborts and steps."""

    forks = accepted = replayed = loaded = 0

    @initialize(
        specs=GROUPS,
        block_size=st.sampled_from([1, 2, 4]),
        blocks=st.integers(6, 40),
        depth=st.integers(1, 3),
        max_requests=st.integers(1, 4),
        step_tokens=st.integers(1, 9),
        prefix_cache=st.sampled_from([True, True, False]),
        cuts=CUTS,
        drafts=st.integers(0, 4),
        host=st.sampled_from([0, 2, 8, 40]),
        delay=st.integers(0, 4),
    )
    def start(
        self,
        specs: list[StateSpec],
        block_size: int,
        blocks: int,
        depth: int,
        max_requests: int,
        step_tokens: int,
        prefix_cache: bool,
        cuts: list[int],
        drafts: int,
        host: int,
        delay: int,
    ) -> None:
        self.harness = Harness(
            specs,
            block_size=block_size,
            blocks=blocks,
            depth=depth,
            max_requests=max_requests,
            step_tokens=step_tokens,
            prefix_cache=prefix_cache,
            cuts=cuts,
            drafts=drafts,
            host=host if prefix_cache else 0,
            delay=delay,
        )
        self.ids = itertools.count()
        self.cut: list[str] = []

    @precondition(lambda self: not all(self.harness.reasons.values()))
    @rule(
        pick=st.integers(0, 1000),
        known=st.integers(0, 4),
        more=st.lists(st.integers(0, VOCABULARY - 1), max_size=3),
        max_tokens=st.integers(1, 12),
        salt=st.sampled_from([None, None, None, "tenant"]),
        count=st.integers(1, 3),
    )
    def fork(self, pick: int, known: int, more: list[int], max_tokens: int, salt: str | None, count: int) -> None:
        """Some that begin as another one, as far as it has come, and perhaps go another way."""
        running = [name for name, reasons in self.harness.reasons.items() if not reasons]
        parent = running[pick % len(running)]
        message = self.harness.messages[parent]
        for _ in range(count):
            self.harness.send(
                NewRequest(
                    id=f"r{next(self.ids)}",
                    prompt=message.prompt + self.harness.outputs[parent][:known] + more,
                    max_tokens=max_tokens,
                    cache_salt=message.cache_salt if salt is None else salt,
                    sampling=Sampling(temperature=0.0),
                    fork_of=parent,
                )
            )

    @precondition(lambda self: any(self.harness.outputs.values()))
    @rule(
        pick=st.integers(0, 1000),
        more=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3),
        max_tokens=st.integers(1, 6),
    )
    def next_turn(self, pick: int, more: list[int], max_tokens: int) -> None:
        """A chat goes on, perhaps after others have taken its blocks."""
        answered = [name for name, tokens in self.harness.outputs.items() if tokens]
        name = answered[pick % len(answered)]
        message = self.harness.messages[name]
        self.harness.send(
            NewRequest(
                id=f"r{next(self.ids)}",
                prompt=message.prompt + self.harness.outputs[name] + more,
                max_tokens=max_tokens,
                cache_salt=message.cache_salt,
                sampling=Sampling(temperature=0.0),
            )
        )

    @rule(
        prefix=st.sampled_from(PREFIXES),
        rest=st.lists(st.integers(0, VOCABULARY - 1), max_size=9),
        max_tokens=st.integers(1, 12),
        stops=st.sampled_from([[], [], [0], [1, 3]]),
        salt=st.sampled_from(["", "", "tenant"]),
        priority=st.sampled_from([0, 0, 1]),
        copies=st.sampled_from([1, 2, 3]),
        forked=st.booleans(),
    )
    def arrive(
        self,
        prefix: list[int],
        rest: list[int],
        max_tokens: int,
        stops: list[int],
        salt: str,
        priority: int,
        copies: int,
        forked: bool,
    ) -> None:
        first = f"r{len(self.harness.messages)}" if forked else ""
        for _ in range(copies):
            self.harness.send(
                NewRequest(
                    id=f"r{next(self.ids)}",
                    prompt=prefix + rest,
                    max_tokens=max_tokens,
                    stop_token_ids=stops,
                    cache_salt=salt,
                    priority=priority,
                    sampling=Sampling(temperature=0.0),
                    fork_of=first,
                )
            )

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @precondition(lambda self: self.harness.messages)
    @rule(pick=st.integers(0, 1000), kind=st.sampled_from([Abort, Finish]))
    def cut_short(self, pick: int, kind: type[Abort] | type[Finish]) -> None:
        name = f"r{pick % len(self.harness.messages)}"
        self.cut.append(name)
        self.harness.send(kind(name))

    @invariant()
    def no_block_is_leaked_or_shared_by_mistake(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check_blocks()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.run()
            self.harness.check_answers(self.cut)
            self.harness.check_all_given_back()
            Traffic.forks += self.harness.scheduler.stats.forks
            right, specs = self.harness.scheduler.stats.accepted_tokens, self.harness.state.specs
            Traffic.accepted += right
            Traffic.replayed += right if any(spec.per == "request" for spec in specs) else 0
            Traffic.loaded += self.harness.device.loaded


def traffic(examples: int, steps: int) -> None:
    Traffic.forks = Traffic.accepted = Traffic.replayed = Traffic.loaded = 0
    run_state_machine_as_test(
        Traffic,
        settings=patient(examples, stateful_step_count=steps),
    )
    assert Traffic.forks > examples // 10, f"only {Traffic.forks} forks in {examples} runs"
    assert Traffic.accepted > examples, f"only {Traffic.accepted} right drafts in {examples} runs"
    assert Traffic.replayed > examples // 4, f"only {Traffic.replayed} of these with rows of state"
    assert Traffic.loaded > examples // 10, f"only {Traffic.loaded} blocks came back in {examples} runs"


def test_random_traffic_gets_its_own_tokens_one_terminal_event_each_and_leaves_no_block_behind() -> None:
    traffic(60, 25)


@pytest.mark.slow
def test_a_lot_of_random_traffic_gets_its_own_tokens_one_terminal_event_each_and_leaves_no_block_behind() -> None:
    traffic(1500, 40)


@settings(max_examples=150, deadline=None, database=None)
@given(
    specs=GROUPS,
    block_size=st.sampled_from([1, 2, 4]),
    step_tokens=st.integers(1, 9),
    depth=st.integers(1, 3),
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=24),
    max_tokens=st.integers(1, 12),
    cuts=CUTS,
)
def test_a_request_that_just_fits_finishes_and_with_one_block_less_it_is_refused(
    specs: list[StateSpec], block_size: int, step_tokens: int, depth: int, prompt: list[int], max_tokens: int,
    cuts: list[int],
) -> None:  # fmt: skip
    state = StateManager(specs, KINDS, block_size, 1, cuts=cuts[: len(specs)])
    least = state.slabs_for(len(prompt) + max_tokens, step_tokens)
    options: dict[str, Any] = {"block_size": block_size, "step_tokens": step_tokens, "depth": depth, "cuts": cuts}
    message = NewRequest(id="r", prompt=prompt, max_tokens=max_tokens)
    fits = Harness(specs, blocks=least + 1, **options)
    # A shorter request's prefix is in the cache, so that the second one starts in the middle.
    fits.send(NewRequest(id="before", prompt=prompt[:-1] or [0], max_tokens=1))
    fits.run()
    fits.send(message)
    fits.run()
    fits.check_answers()
    fits.check_all_given_back()
    refused = Harness(specs, blocks=least, **options)
    refused.send(message)
    (end,) = refused.reasons["r"]
    assert end.reason == "error" and end.status == 400 and end.error is not None
    assert str(least) in end.error and "max_tokens" in end.error and "infer.kv_memory" in end.error


def test_a_tiny_pool_forces_preemption_and_changes_no_token() -> None:
    tight = Harness([FULL], blocks=12, max_requests=3)
    for name in "abc":
        tight.send(NewRequest(id=name, prompt=[int(c) for c in f"{ord(name) % 4}12301"], max_tokens=10))
    tight.run()
    assert tight.scheduler.stats.preemptions > 0
    tight.check_answers()


def chat(one: Harness, turns: int) -> None:
    """Three chats in turns, whose blocks do not fit together."""
    said = {name: [int(c) for c in f"{number}123{number}0231{number}"] for number, name in enumerate("abc")}
    for turn in range(turns):
        for name, tokens in said.items():
            one.send(NewRequest(id=f"{name}{turn}", prompt=list(tokens), max_tokens=4))
            one.run()
            tokens += one.outputs[f"{name}{turn}"]


@pytest.mark.parametrize("specs", [[FULL], [FULL, window(4)], [FULL, RECURRENT], [APART], [window(3)]])
@pytest.mark.parametrize("delay", [0, 3])
def test_a_chat_whose_blocks_had_left_gets_them_from_the_host(specs: list[StateSpec], delay: int) -> None:
    options: dict[str, Any] = {"blocks": 13 * len(specs) + 1, "max_requests": 1, "delay": delay}
    with_host, without = Harness(specs, host=100, **options), Harness(specs, **options)
    for one in (with_host, without):
        chat(one, 3)
        one.check_answers()
        one.check_all_given_back()
    if FULL in specs:
        assert with_host.device.loaded > 12
        assert with_host.scheduler.stats.computed_tokens < 0.7 * without.scheduler.stats.computed_tokens


class WrongBlock(SimulatedDevice):
    """Writes what comes back to the block beside the right one."""

    def wrong_block(self, block: int) -> int:
        return block + 1 if block + 1 < self.state.pool.count else block - 1


def test_a_block_that_comes_back_to_the_wrong_place_is_noticed() -> None:
    """A planted fault."""
    one = Harness([FULL], blocks=14, max_requests=1, host=100, device=WrongBlock)
    with pytest.raises(AssertionError, match="does not hold what slot 0 reads"):
        chat(one, 3)


def test_a_request_waits_for_its_blocks_while_others_run_and_gives_them_back_when_it_is_aborted() -> None:
    one = Harness([FULL], blocks=20, host=100, max_requests=2, delay=4)
    chat(one, 1)
    one.send(NewRequest(id="other", prompt=[3, 3], max_tokens=14))
    one.step()
    one.send(NewRequest(id="turn", prompt=[*one.messages["a0"].prompt, *one.outputs["a0"], 1], max_tokens=2))
    one.step()
    assert one.host is not None and list(one.host._loads) == ["turn"] and len(one.scheduler.running) == 1
    one.check_blocks()
    one.send(Abort("turn"))
    one.check_blocks()
    assert not one.host._loads
    # Whoever gets these blocks now waits for the copies to them.
    one.send(NewRequest(id="next", prompt=[2, 1] * 9, max_tokens=4))
    one.run()
    one.check_answers(["turn"])
    one.check_all_given_back()


@pytest.mark.parametrize("host", range(1, 16))
def test_a_host_of_any_size_gives_back_what_it_was_given(host: int) -> None:
    """Blocks that are being read there are not written to in the same step."""
    one = Harness([FULL], blocks=16, host=host, max_requests=2)
    chat(one, 4)
    one.check_answers()


def test_a_second_request_for_blocks_that_are_on_their_way_waits_for_them_too() -> None:
    one = Harness([FULL], blocks=20, host=100, max_requests=3, delay=100)
    chat(one, 1)
    one.send(NewRequest(id="other", prompt=[3, 3], max_tokens=14))
    one.step()
    prompt = [*one.messages["a0"].prompt, *one.outputs["a0"]]
    for name in ("turn", "same host"):
        one.send(NewRequest(id=name, prompt=[*prompt, len(name) % 4], max_tokens=2))
    one.run()
    assert one.scheduler.stats.cached_tokens >= 2 * 12
    one.check_answers()
    one.check_all_given_back()


def test_a_request_that_must_run_alone_lets_no_other_hold_blocks() -> None:
    one = Harness([FULL], blocks=20, host=100, max_requests=2, delay=4)
    chat(one, 1)
    one.send(NewRequest(id="other", prompt=[3, 3], max_tokens=14))
    one.step()
    one.send(NewRequest(id="turn", prompt=[*one.messages["a0"].prompt, *one.outputs["a0"], 1], max_tokens=2))
    one.step()
    alone = Request(NewRequest(id="alone", prompt=[1, 2, 3], max_tokens=2), 9)
    alone.exclusive = True
    assert one.host is not None and list(one.host._loads) == ["turn"] and one.host.ready(alone, busy=True)
    assert not one.host._loads and one.host.ready(one.scheduler.waiting[0], busy=False)
    one.run()
    one.check_answers()


def test_a_prompt_that_has_to_be_computed_whole_gets_nothing_from_the_host() -> None:
    one = Harness([FULL], blocks=14, max_requests=1, host=100)
    chat(one, 1)
    before = one.scheduler.stats.computed_tokens
    prompt = [*one.messages["a0"].prompt, *one.outputs["a0"], 1]
    one.send(NewRequest(id="whole", prompt=prompt, max_tokens=1, whole_prompt=True))
    one.run()
    assert one.device.loaded == 0 and one.scheduler.stats.computed_tokens == before + len(prompt)
    one.send(NewRequest(id="again", prompt=[*one.messages["b0"].prompt, *one.outputs["b0"], 1], max_tokens=1))
    one.run()
    assert one.device.loaded > 0
    one.check_answers()


def test_running_requests_take_the_blocks_that_a_waiting_one_holds_before_one_of_them_is_preempted() -> None:
    one = Harness([FULL], blocks=16, host=100, max_requests=2, delay=100)
    chat(one, 1)
    one.send(NewRequest(id="other", prompt=[3, 3], max_tokens=26))
    one.step()
    one.send(NewRequest(id="turn", prompt=[*one.messages["a0"].prompt, *one.outputs["a0"], 1], max_tokens=2))
    one.run()
    assert one.scheduler.stats.preemptions == 0
    one.check_answers()
    one.check_all_given_back()


def test_the_wait_of_a_request_is_counted_once_however_often_it_is_preempted() -> None:
    tight = Harness([FULL], blocks=12, max_requests=3)
    for name in "abc":
        tight.send(NewRequest(id=name, prompt=[int(c) for c in f"{ord(name) % 4}12301"], max_tokens=10))
    tight.run()
    stats = tight.scheduler.stats
    assert stats.preemptions > 0 and sum(stats.queued) == 3
    assert stats.queued_seconds > 0 and stats.queried_tokens > 3 * 6


def test_half_prefilled_requests_that_fill_the_pool_together_do_not_deadlock() -> None:
    tight = Harness([FULL], blocks=9, max_requests=2, step_tokens=7, prefix_cache=False)
    for name in "ab":
        tight.send(NewRequest(id=name, prompt=[0, 1, 2, 3, 0] * 2, max_tokens=4))
    seen = []
    while not tight.controller.idle:
        seen.append([(r.computed, r.length) for r in tight.scheduler.running])
        tight.step()
    assert any(len(rows) == 2 and 0 < rows[1][0] < 10 for rows in seen), "nobody was half-prefilled beside another"
    assert tight.scheduler.stats.preemptions > 0
    tight.check_answers()


class Splintered(StateManager):
    """A pool in pieces: nobody gets beyond 6 tokens beside others' prefixes."""

    def grow(self, table: BlockTable, tokens: int, drafts: int = 0) -> Growth | None:
        return super().grow(table, tokens) if tokens <= 6 or table.exclusive else None


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_request_blocked_by_fragmentation_restarts_in_an_empty_pool(depth: int) -> None:
    one = Harness([FULL, RECURRENT], cuts=[4, 1], depth=depth)
    one.state = one.device.state = one.scheduler.state = Splintered([FULL, RECURRENT], KINDS, 2, 20, cuts=[4, 1])
    for name, length in (("a", 3), ("b", 12), ("c", 4), ("d", 9)):
        one.send(NewRequest(id=name, prompt=[1, 2, 3, 0] * 3 if length == 12 else [2] * length, max_tokens=5))
    while not one.controller.idle:
        one.step()
        one.check_blocks()
        alone = [r.id for r in one.scheduler.running if r.exclusive]
        assert not alone or len(one.scheduler.running) == 1
    one.check_answers()
    one.check_all_given_back()


def test_a_request_that_just_fits_ends_though_many_plans_in_flight_would_hold_more_blocks_than_it_needs() -> None:
    one = Harness([window(7), FULL], block_size=4, blocks=9, depth=3, step_tokens=7, cuts=[4, 1])
    one.send(NewRequest(id="r0", prompt=[0] * 25, max_tokens=2, sampling=Sampling(temperature=0.0)))
    assert one.scheduler.open == 1, "it fits"
    one.run()
    one.check_answers([])
    one.check_all_given_back()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_large_request_is_not_starved_by_a_stream_of_small_ones(depth: int) -> None:
    busy = Harness([FULL], blocks=16, max_requests=3, depth=depth)
    for number in range(200):
        if number == 6:
            busy.send(NewRequest(id="large", prompt=[0, 1, 2, 3] * 5, max_tokens=8))
        busy.send(NewRequest(id=f"small{number}", prompt=[number % 4, 2], max_tokens=3))
        busy.step()
        if busy.reasons.get("large"):
            break
    assert busy.reasons["large"] and number < 60
    assert busy.scheduler.open > 0


def test_a_higher_priority_goes_first_and_equals_go_in_order_of_arrival() -> None:
    one = Harness([FULL], max_requests=1)
    for name, priority in (("first", 0), ("second", 0), ("urgent", 1)):
        one.send(NewRequest(id=name, prompt=[1, 2], max_tokens=2, priority=priority))
    ends: list[str] = []
    while not one.controller.idle:
        one.step()
        ends += [name for name, reasons in one.reasons.items() if reasons and name not in ends]
    assert ends == ["urgent", "first", "second"]


def test_a_prefix_is_found_again_only_under_the_same_salt() -> None:
    one = Harness([FULL, window(4), RECURRENT], max_requests=1)
    for name, salt in (("first", ""), ("again", ""), ("stranger", "tenant")):
        one.send(NewRequest(id=name, prompt=[1, 2, 3, 0, 1, 2, 3], max_tokens=2, cache_salt=salt))
        one.run()
    assert (one.scheduler.stats.prefix_hits, one.scheduler.stats.cached_tokens) == (1, 6)
    one.check_answers()


def test_a_step_mixes_the_prompt_of_one_request_with_the_answer_of_another() -> None:
    two = Harness([FULL])
    two.send(NewRequest(id="a", prompt=[1], max_tokens=8))
    two.step()
    two.send(NewRequest(id="b", prompt=[2] * 9, max_tokens=2))
    two.run()
    assert two.scheduler.stats.mixed_steps > 0
    two.check_answers()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_after_the_end_of_a_request_are_neither_returned_nor_cached(depth: int) -> None:
    prompt = [1, 2, 3]
    first = answer(NewRequest(id="x", prompt=prompt, max_tokens=9))
    stop = first[2]
    one = Harness([FULL], block_size=1, depth=depth)
    one.send(NewRequest(id="a", prompt=prompt, max_tokens=9, stop_token_ids=[stop]))
    one.run()
    one.check_answers()
    known = [*prompt, *one.outputs["a"]]
    named = sum(key is not None for key in one.state.pool._keys)
    assert named <= len(known), "state of a surplus token was cached"
    one.check_all_given_back()


def test_a_repeated_id_and_an_empty_prompt_end_at_once_with_the_reason() -> None:
    one = Harness([FULL])
    one.send(NewRequest(id="a", prompt=[1], max_tokens=4))
    (event,) = one.controller.handle([NewRequest(id="a", prompt=[1], max_tokens=4)])
    assert isinstance(event, Finished) and "already in use" in (event.error or "") and event.status == 400
    (event,) = one.controller.handle([NewRequest(id="b", prompt=[], max_tokens=4)])
    assert isinstance(event, Finished) and "at least one prompt token" in (event.error or "")
    one.run()
    one.check_answers()
