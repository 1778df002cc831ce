"""The scheduler.

There is no prefill phase and no decode phase. Every request has tokens that exist and tokens whose state is computed;
each step hands out a token budget to close that difference. A request that closes it samples one more token, which
opens it again. Chunked prefill is a difference larger than the budget; a prefix hit is a difference that starts
smaller; preemption sets the computed tokens back to zero. Several plans
may be in flight: a plan may compute on a token that nobody has read yet, because its id lives on the device.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from evener.engine.forks import Copies, attach, open_state
from evener.engine.messages import (
    QUEUE_SECONDS,
    Finished,
    FinishReason,
    FromController,
    NewRequest,
    TokenLogprobs,
    Tokens,
)
from evener.engine.plan import Admission, Plan, StepResult, TableUpdate
from evener.engine.request import Request
from evener.engine.state import StateManager
from evener.media.planner import MediaPlanner

#: Orders waiting requests; the smallest goes first. Ties keep the order of arrival.
Policy = Callable[[Request], tuple[int, ...]]


def first_come(request: Request) -> tuple[int, ...]:
    """Higher priority first, then the order of arrival."""
    return (-request.message.priority, request.order)


@dataclass
class Stats:
    """Counters since the start.

    ``queried_tokens`` were looked up in the prefix cache, of which ``cached_tokens`` were there. ``queued``: requests
    by the time that they waited for their first step, at most ``QUEUE_SECONDS``; ``queued_seconds``: all of it.
    ``forks`` started from another request's state, with ``forked_tokens`` in it.
    """

    steps: int = 0
    mixed_steps: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    finished: int = 0
    queried_tokens: int = 0
    queued: list[int] = field(default_factory=lambda: [0] * (len(QUEUE_SECONDS) + 1))
    queued_seconds: float = 0.0
    forks: int = 0
    forked_tokens: int = 0

    def waited(self, seconds: float) -> None:
        """A request has begun after so long."""
        self.queued[bisect_left(QUEUE_SECONDS, seconds)] += 1
        self.queued_seconds += seconds


@dataclass(frozen=True)
class MicroBatches:
    """How plans are filled for ``stages`` pipeline stages: each gets its share of the requests, so that no stage waits
    for a token that another is yet to sample. ``prefill`` and ``decode`` set the numbers of requests in a plan that
    read prompts and that add a token."""

    stages: int = 1
    prefill: int | None = None
    decode: int | None = None

    def room(self, adding: int, reading: int) -> dict[bool, int]:
        """How many of so many requests a plan may take, by whether they add a token."""
        return {True: self.decode or -(-adding // self.stages), False: self.prefill or -(-reading // self.stages)}


@dataclass
class _Draft:
    """A plan in the making. ``room``: requests that it may still take, by whether they add a token."""

    plan_id: int
    budget: int
    room: dict[bool, int]
    rows: list[tuple[Request, int, int, bool]] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    updates: list[TableUpdate] = field(default_factory=list)
    copies: Copies = field(default_factory=list)


class Scheduler:
    """Decides what each step computes; owns every request from arrival to its terminal event.

    Args:
        state: hands out blocks.
        max_requests: requests that run at once (slots).
        step_tokens: token budget of a step.
        policy: order of waiting requests.
        batches: how plans are filled for pipeline stages.
        media: says what stands for tokens, and when it is encoded.
    """

    def __init__(
        self, state: StateManager, max_requests: int, step_tokens: int, policy: Policy = first_come,
        batches: MicroBatches | None = None, media: MediaPlanner | None = None,
    ) -> None:  # fmt: skip
        self.state, self.step_tokens, self.policy = state, step_tokens, policy
        self.batches = batches or MicroBatches()
        self.media = media or MediaPlanner(step_tokens, step_tokens)
        self.stats = Stats()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._slots = list(range(max_requests - 1, -1, -1))
        self._in_flight: deque[tuple[Plan, list[tuple[Request, int, int, bool]]]] = deque()
        self._leaving: list[Request] = []
        self._blocked: tuple[str, int] | None = None
        self._next_plan = 0
        self._arrivals = 0

    @property
    def in_flight(self) -> int:
        """Plans that were handed out and not retired."""
        return len(self._in_flight)

    @property
    def open(self) -> int:
        """Requests without a terminal event."""
        return len(self._requests)

    def add(self, message: NewRequest) -> list[FromController]:
        """Take a request in; one that can never run ends at once with reason ``error``."""
        problem = self._refusal(message)
        if problem is not None:
            return [Finished(id=message.id, reason="error", error=problem, status=400)]
        request = Request(message, self._arrivals)
        self._arrivals += 1
        # Less than a block is not worth the step that its parent stops for.
        attach(request, self._requests.get(message.fork_of), self.state.block_size)
        self._requests[request.id] = request
        self.waiting.append(request)
        return []

    def _refusal(self, message: NewRequest) -> str | None:
        if message.id in self._requests:
            return f"request id {message.id!r} is already in use; send another id"
        if not message.prompt or message.max_tokens < 1:
            return "a request needs at least one prompt token and max_tokens of at least 1"
        needed = self.state.blocks_for(len(message.prompt) + message.max_tokens, self.step_tokens)
        if needed > self.state.blocks - 1:
            return (
                f"prompt and max_tokens need {needed} state blocks but the pool has {self.state.blocks - 1}; "
                "send a shorter prompt, lower max_tokens, or restart with a larger infer.kv_memory"
            )
        return self.media.refusal(message)

    def end(self, request_id: str, reason: FinishReason, error: str | None = None) -> list[FromController]:
        """End a request now (abort, stop string, failure). Unknown ids are ignored: it may just have finished."""
        request = self._requests.get(request_id)
        return [] if request is None else [self._finish(request, reason, error)]

    def end_all(self, reason: FinishReason, error: str | None = None) -> list[FromController]:
        """End every open request."""
        return [self._finish(request, reason, error) for request in list(self._requests.values())]

    def schedule(self) -> Plan | None:
        """The next plan; None when nothing can be computed before a result is read (or nothing is left to do)."""
        # With stages, those whose token is still on its way through them come last: a stage would wait for it.
        for early in (False, True)[: min(self.batches.stages, 2)]:
            adding = sum(request.to_compute == 1 for request in self.running)
            room = self.batches.room(adding, len(self.running) - adding + len(self.waiting))
            draft = _Draft(self._next_plan, self.step_tokens, room)
            if self._continue_running(draft, early) or not (self.running or self._in_flight):
                self._admit_waiting(draft)
            if draft.rows:
                return self._hand_out(draft)
        return None

    def _fits(self, draft: _Draft, request: Request, adds: bool, early: bool = True) -> bool:
        """Whether the plan takes this request, as far as its stages are concerned; then its room is taken."""
        if self.batches.stages == 1:
            return True
        on_its_way = request.last_plan > draft.plan_id - self.batches.stages
        if draft.room[adds] <= 0 or (request.unread and on_its_way and not early):
            return False
        draft.room[adds] -= 1
        return True

    def _continue_running(self, draft: _Draft, early: bool) -> bool:
        """Rows of running requests; True if there was room for all of them, so that others may come in."""
        preempted = False
        longest = [] if self.batches.stages == 1 else sorted(self.running, key=lambda request: request.last_plan)
        for request in longest or list(self.running):
            # One that runs alone has one plan in flight: with more it would hold more blocks than it was found to need.
            if request.slot < 0 or not request.to_compute or (request.alone and self._in_flight):
                continue
            if draft.budget == 0:
                return False
            count = self.media.allow(request, min(request.to_compute, draft.budget))
            if not count or not self._fits(draft, request, request.to_compute == 1, early):
                continue
            while not self._plan_row(draft, request, count):
                planned = [row[0] for row in draft.rows]
                victim = next(r for r in reversed(self.running) if r not in planned)
                # What is in flight is read before it is preempted; until then it gets no row, so that it soon is.
                if self._flies(victim):
                    return False
                # Blocks of several sizes may lie so that a request that fits does not: it starts over in an empty pool.
                victim.alone = victim is self.running[0] and not self._in_flight
                self._preempt(victim)
                preempted = True
                if victim is request:
                    return False
        return not preempted

    def _admit_waiting(self, draft: _Draft) -> None:
        self.waiting.sort(key=self.policy)
        while self._slots and draft.budget and not any(r.alone for r in self.running):
            request = next((r for r in self.waiting if not r.held), None)
            if request is None or not self._fits(draft, request, adds=False):
                return
            if request.alone and (self.running or self._in_flight):
                return
            if self._blocked == (request.id, self.state.pool.free):
                return  # nothing has changed since it did not fit
            copies = open_state(self.state, request)
            request.slot = self._slots.pop()
            count = self.media.allow(request, min(request.to_compute, draft.budget))
            if not count or not self._plan_row(draft, request, count, admit=True):
                self._give_back(request)
                if not count:
                    return  # its media come in another step
                if not (self.running or self._in_flight or request.alone):
                    request.alone = True
                    continue
                self._blocked = (request.id, self.state.pool.free)
                return
            self.waiting.remove(request)
            self.running.append(request)
            self._begin(draft, request, copies)

    def _begin(self, draft: _Draft, request: Request, copies: Copies | None) -> None:
        """Note what is there already of a request that was admitted: from the prefix cache, or its parent's state."""
        there, parent = request.planned, request.parent
        request.parent = None
        if copies is None or parent is None:
            self.stats.queried_tokens += request.length
            self.stats.prefix_hits += there > 0
            self.stats.cached_tokens += there
        else:
            parent.last_plan = draft.plan_id
            draft.copies += copies
            self.stats.forks += 1
            self.stats.forked_tokens += there
        if not request.preemptions:
            request.cached = there
            self.stats.waited(time.monotonic() - request.arrived)

    def _plan_row(self, draft: _Draft, request: Request, count: int, admit: bool = False) -> bool:
        assert request.table is not None, "a running request has a table"
        growth = self.state.grow(request.table, request.planned + count)
        if growth is None:
            return False
        if admit:
            sampling = request.message.sampling
            draft.admissions.append(Admission(request.slot, list(request.tokens), sampling, request.prompt_length))
            draft.updates.append(TableUpdate(request.slot, 0, [list(b) for b in request.table.blocks]))
        elif growth.blocks:
            draft.updates.append(TableUpdate(request.slot, growth.start, [list(b) for b in growth.blocks]))
        self.media.take(request, count)
        draft.rows.append((request, request.planned, count, request.planned + count == request.length))
        draft.budget -= count
        return True

    def _flies(self, request: Request) -> bool:
        """Whether a plan in flight names it."""
        return bool(self._in_flight) and request.last_plan >= self._in_flight[0][0].id

    def _preempt(self, request: Request) -> None:
        """Give everything back; the request starts over with all its tokens known."""
        assert request.unread == 0, "a request with an unread token is not preempted"
        self.running.remove(request)
        self._give_back(request)
        request.preemptions += 1
        self.stats.preemptions += 1
        self.waiting.append(request)

    def _give_back(self, request: Request) -> None:
        assert request.table is not None
        self.state.close(request.table)
        self.media.release(request)
        self._slots.append(request.slot)
        request.table, request.slot, request.planned = None, -1, 0

    def _hand_out(self, draft: _Draft) -> Plan:
        # Providers may compute requests that add one token in another way: they come first.
        draft.rows.sort(key=lambda row: row[2] > 1)
        scores: list[tuple[int, int, int]] = []
        for index, (request, start, count, sampled) in enumerate(draft.rows):
            request.planned = start + count
            request.last_plan = draft.plan_id
            request.unread += sampled
            if request.to_score:  # as far as nobody has read it yet
                first = max(0, request.scored - start)
                scored = min(count, request.prompt_length - 1 - start) - first
                scores += [(index, first, scored)] if scored > 0 else []
        wanted = [request.message.sampling for request, *_, sampled in draft.rows if sampled]
        scorers = (draft.rows[index][0].message.sampling for index, *_ in scores)
        plan = Plan(
            id=draft.plan_id, admissions=draft.admissions, updates=draft.updates, copies=draft.copies,
            slots=[r.slot for r, *_ in draft.rows], starts=[s for _, s, *_ in draft.rows],
            counts=[c for _, _, c, _ in draft.rows], samples=[i for i, row in enumerate(draft.rows) if row[3]],
            random=[i for i, s in enumerate(wanted) if s.temperature > 0],
            filtered=any(s.temperature > 0 and s.filtered for s in wanted),
            logprobs=[i for i, s in enumerate(wanted) if s.logprobs is not None],
            top_logprobs=max((s.logprobs or 0 for s in wanted), default=0),
            penalized=[i for i, s in enumerate(wanted) if s.penalized],
            biased=[i for i, s in enumerate(wanted) if s.bias],
            scores=scores, top_scores=max((s.prompt_logprobs or 0 for s in scorers), default=0),
            media=self.media.hand_out(draft.rows),
        )  # fmt: skip
        self._next_plan += 1
        self._in_flight.append((plan, draft.rows))
        self._count(draft)
        return plan

    def _count(self, draft: _Draft) -> None:
        self.stats.steps += 1
        self.stats.computed_tokens += self.step_tokens - draft.budget
        prefilling = any(start < request.prompt_length for request, start, _, _ in draft.rows)
        decoding = any(start >= request.prompt_length for request, start, _, _ in draft.rows)
        self.stats.mixed_steps += prefilling and decoding

    def retire(self, result: StepResult) -> list[FromController]:
        """Read the oldest plan's result: tokens become known, blocks findable, and what was waiting for it is given
        back."""
        plan, rows = self._in_flight.popleft()
        assert plan.id == result.plan, f"plan {plan.id} is the oldest in flight, not {result.plan}"
        ids, scores = iter(result.ids), iter(result.scores)
        logprobs = dict(zip(plan.logprobs, result.logprobs, strict=True))
        scored = {row: [next(scores) for _ in range(count)] for row, _, count in plan.scores}
        events: list[FromController] = []
        sampled = 0
        for index, (request, start, count, samples) in enumerate(rows):
            token = next(ids) if samples else None
            if request.finish is None:
                assert request.table is not None
                self.state.commit(request.table, request.tokens, start + count)
                events.extend(self._read(request, token, logprobs.get(sampled), scored.get(index)))
            sampled += samples
        self._release_leaving(plan.id)
        return events

    def _read(
        self, request: Request, token: int | None, logprobs: TokenLogprobs | None, scores: list[TokenLogprobs] | None
    ) -> Iterator[FromController]:
        if token is None and scores is None:
            return
        sampling = request.message.sampling
        request.scored += len(scores or ())
        yield Tokens(
            id=request.id, ids=[] if token is None else [token], cached=request.cached,
            # Of what was computed for the most demanding row of the step, each gets what it asked for.
            logprobs=None if logprobs is None or token is None else [logprobs.likeliest(sampling.logprobs or 0)],
            prompt_logprobs=None if scores is None else [s.likeliest(sampling.prompt_logprobs or 0) for s in scores],
        )  # fmt: skip
        if token is None:
            return
        request.tokens.append(token)
        request.unread -= 1
        if token in request.stop_ids:
            yield self._finish(request, "stop")
        elif len(request.tokens) >= request.limit:
            yield self._finish(request, "length")

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> Finished:
        request.finish = reason
        del self._requests[request.id]
        self.stats.finished += 1
        if request.slot < 0:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._leaving.append(request)
            if not self._flies(request):
                self._release_leaving(request.last_plan)
        # Requests only fail here when the engine goes: elsewhere they may succeed.
        return Finished(id=request.id, reason=reason, error=error, status=503)

    def _release_leaving(self, retired: int) -> None:
        """Blocks and slots of finished requests return when the last plan that names them is retired."""
        staying = []
        for request in self._leaving:
            if request.last_plan <= retired:
                self._give_back(request)
            else:
                staying.append(request)
        self._leaving = staying
