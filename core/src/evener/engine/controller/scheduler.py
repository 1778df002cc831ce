"""The scheduler: continuous batching by a single rule.

There is no prefill phase and no decode phase. A request is a sequence of tokens that grows. Its tokens exist as soon as
they are known: first the prompt, then each sampled token. The model computes them in order and leaves their state (the
KV cache) in memory. So two lengths describe a request: how many tokens exist, and how many of them are computed. Each
step has a token budget. The scheduler divides it among the requests, and a request gets at most the tokens that exist
and are not computed yet. Where a request computes its last token, the model samples the next one: again one token
exists that is not computed, so the request takes part in the next step.

With a budget of 8, a prompt A of 5 tokens and a prompt B of 10:

====  ===================================  ===================================
step  A                                    B
====  ===================================  ===================================
1     computes its 5 prompt tokens,        computes 3 prompt tokens; then the
      samples a1                           budget is used up
2     computes a1, samples a2              computes the other 7, samples b1
3     computes a2, samples a3              computes b1, samples b2
====  ===================================  ===================================

All else follows:

- Prefill is a request with many tokens to compute, decode is one with a single token. Both share one step.
- Chunked prefill is a request with more tokens to compute than the budget leaves, as B in step 1.
- Requests join at any step and leave when they end. No request waits until a batch is finished.
- After a prefix cache hit, a request starts with part of its tokens computed. If a connector keeps more of its prefix
  elsewhere, it waits until that is in the prefix cache.
- Preemption sets the computed tokens to zero and keeps the tokens. The request computes them again later.

Running requests come first. Waiting ones start while budget, slots and free blocks are left. If a running request needs
a block and none is free, the request that started last is preempted. Scheduling for each step anew is due to Orca (Yu
et al., OSDI 2022), chunked prefill beside decode to Sarathi (Agrawal et al., 2023).

Several plans may be in flight. The plan of step 2 must know that a1 will exist, but not its id, because the worker
takes the id from the device's memory. So it can be made before the result of step 1 is read. Whatever depends on ids
waits for the result: stop tokens, the keys of the prefix cache, and the messages to the front end.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import msgspec

from evener.contracts.adapters import AdapterSlots
from evener.contracts.connector import Connector
from evener.contracts.generation.drafts import NOT_YET, Drafts
from evener.contracts.outputs import FinishReason
from evener.engine.batching.micro_batches import MicroBatches
from evener.engine.batching.step_limit import StepLimit
from evener.engine.controller.forks import open_state, start_from_parent
from evener.engine.controller.grammars import Grammars
from evener.engine.controller.media import Media
from evener.engine.controller.request import PlannedRow, Request, RowResult, results_by_row, wanted_outputs
from evener.engine.controller.state import StateManager
from evener.engine.wire.messages import Finished, FromController, NewRequest, Sampling, Stats, Tokens
from evener.engine.wire.plan import Admission, BlockCopy, DraftedTokens, Plan, SamplePlan, StepResult, TableUpdate
from evener.sampling_params import MAX_LOGPROBS

#: So many seconds of waiting count as much as a priority that is higher by one.
AGING_SECONDS = 30.0


def priority_and_age(request: Request) -> tuple[float, ...]:
    """The sort key of waiting requests, of which the smallest starts first: higher priority first, then the order of
    arrival. Waiting counts too, so that nobody waits for ever: a request of priority p starts as if it had arrived
    p * ``AGING_SECONDS`` earlier."""
    return (request.arrived - AGING_SECONDS * request.message.priority, request.order)


@dataclass
class _NewPlan:
    """A plan in the making: the token ``budget`` that is left, and the requests that it may still take (``quota``, see
    ``MicroBatches``)."""

    plan_id: int
    budget: int
    quota: dict[bool, int]
    rows: list[PlannedRow] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    updates: list[TableUpdate] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)


class _SubmittedPlan(msgspec.Struct, frozen=True):
    """A plan in flight, its rows, and ``Drafts.on`` as it was when the plan was made."""

    plan: Plan
    rows: list[PlannedRow]
    drafts: bool


def _sample_plan(wanted: list[Sampling]) -> SamplePlan:
    """How samples with these parameters are drawn."""
    named = [s.logprob_ids for s in wanted if s.logprobs is not None]
    return SamplePlan(
        random=[i for i, s in enumerate(wanted) if s.temperature > 0],
        filtered=any(s.temperature > 0 and s.filtered for s in wanted),
        logprobs=[i for i, s in enumerate(wanted) if s.logprobs is not None],
        top_logprobs=min(max((s.logprobs or 0 for s in wanted), default=0), MAX_LOGPROBS),
        named=named if any(named) else [],
        penalized=[i for i, s in enumerate(wanted) if s.penalized],
        biased=[i for i, s in enumerate(wanted) if s.bias],
    )


class Scheduler:
    """Decides what each step computes. It owns every request from its arrival to its terminal event.

    Args:
        state: gives out blocks of state.
        max_requests: how many requests run at the same time (slots).
        step_tokens: token budget of a step.
        batches: how requests are divided among plans; default: for a single stage.
        media: plans when media are encoded and dropped.
        limit: how much of the budget a step may use; default: all of it.
        grammars: whether a request's grammar is compiled, for which it waits; default: no request has one.
        drafts: proposes tokens of requests (speculative decoding); default: none.
        adapters: those that requests may name; default: there are none.
        connector: keeps state that leaves the prefix cache, for which requests may wait; default: nothing is kept.
    """

    def __init__(
        self, state: StateManager, max_requests: int, step_tokens: int, batches: MicroBatches | None = None,
        media: Media | None = None, limit: StepLimit | None = None, grammars: Grammars | None = None,
        drafts: Drafts | None = None, adapters: AdapterSlots | None = None, connector: Connector | None = None,
    ) -> None:  # fmt: skip
        self.state, self.step_tokens, self.grammars = state, step_tokens, grammars or Grammars()
        self.batches, self.limit, self.drafts = batches or MicroBatches(), limit or StepLimit(), drafts or Drafts()
        self.media, self.adapters = media or Media(), adapters or AdapterSlots()
        self.connector = connector or Connector()
        self.stats = Stats()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._slots = list(range(max_requests - 1, -1, -1))
        self._in_flight: deque[_SubmittedPlan] = deque()
        self._pending_release: list[Request] = []
        #: The id of the last request that did not fit the pool, and how many pages were free then.
        self._last_blocked: tuple[str, int] | None = None
        self._next_plan = self._arrivals = 0
        #: The sampling parameters of the last plan, and how its samples are drawn.
        self._wanted: list[Sampling] = []
        self._sampling = SamplePlan()

    @property
    def in_flight(self) -> int:
        """Number of plans whose result was not read yet."""
        return len(self._in_flight)

    @property
    def _busy(self) -> bool:
        """Whether the result of a step, or a running request's next step, will give blocks back."""
        return bool(self.running or self._in_flight)

    @property
    def blocked(self) -> bool:
        """Whether a request waits because too little state is free, and not for its turn."""
        request = None if self._last_blocked is None else self._requests.get(self._last_blocked[0])
        return request is not None and request.slot < 0

    @property
    def open(self) -> int:
        """Number of requests without a terminal event."""
        return len(self._requests)

    def add(self, message: NewRequest) -> list[FromController]:
        """Accept a request; one that can never run ends at once with reason ``error``."""
        if (problem := self._rejection_reason(message)) is not None:
            return [Finished(id=message.id, reason="error", error=problem, status=400)]
        request = Request(message, self._arrivals)
        self._arrivals += 1
        # The parent ends a step early for a fork; less than a block of shared tokens is not worth that.
        start_from_parent(request, self._requests.get(message.fork_of), self.state.block_size)
        self._requests[request.id] = request
        self.waiting.append(request)
        return []

    def _rejection_reason(self, message: NewRequest) -> str | None:
        if message.id in self._requests:
            return f"the id {message.id!r} is already in use by an open request; choose another id"
        if not message.prompt or message.max_tokens < 1:
            return "a request needs at least one prompt token and max_tokens of at least 1"
        needed = self.state.slabs_for(len(message.prompt) + message.max_tokens, self.step_tokens)
        if needed > self.state.slabs - 1:
            return (f"prompt and max_tokens need {needed} state blocks but the pool has {self.state.slabs - 1}; "
                    "send a shorter prompt, lower max_tokens, or restart with a larger infer.kv_memory")  # fmt: skip
        if problem := self.media.rejection_reason(message):
            return problem
        if self.state.undivided and len(message.prompt) > self.step_tokens:
            return f"the model computes a text in one step, of {self.step_tokens} tokens: raise infer.step_tokens"
        if not self.adapters.open(message.adapter):
            return "the adapter of this request was unloaded before it arrived; load it again, or name another"
        return None

    def end(self, name: str, reason: FinishReason, error: str | None = None, status: int = 503) -> list[FromController]:
        """End a request now (abort, stop string, failure). Unknown ids are ignored: the request may just have ended.
        ``status``: as in ``Finished``; 503 says that a retry elsewhere may succeed."""
        request = self._requests.get(name)
        return [] if request is None else [self._finish(request, reason, error, status)]

    def end_all(self, reason: FinishReason, error: str | None = None) -> list[FromController]:
        """End every open request."""
        return [self._finish(request, reason, error) for request in list(self._requests.values())]

    def schedule(self) -> Plan | None:
        """Make the next plan; None when nothing can be computed before another result is read, or nothing is left."""
        if self.grammars.awaiting_masks:
            return None
        # With pipeline stages, a request whose last token is not sampled yet is planned only if there is no other: the
        # first stage would wait for that token.
        for early in (False, True) if self.batches.stages > 1 else (False,):
            self.drafts.begin(self.running, min(len(self.waiting), len(self._slots)))
            decoding = sum(request.tokens_to_compute == 1 for request in self.running if self.batches.stages > 1)
            quota = self.batches.quota(decoding, len(self.running) - decoding + len(self.waiting))
            new = _NewPlan(self._next_plan, self.limit.allowed(self.step_tokens, self.running, self.waiting), quota)
            if self._continue_running(new, early) or not self._busy:
                self._admit_waiting(new)
            if new.rows:
                return self._build_plan(new)
        return None

    def _allowed_tokens(self, request: Request, due: int, budget: int) -> int:
        """How many of its tokens that are due a step with this much budget left can compute."""
        count = self.media.allowed_tokens(request, min(due, max(1, budget // request.token_cost)))
        return 0 if self.state.undivided and count < due else count

    def _take_quota(self, new: _NewPlan, request: Request, decodes: bool, early: bool = True) -> bool:
        """Take one place of the plan's quota for this request; False if there is none. ``early``: also for a request
        whose last token may still be in a pipeline stage."""
        if self.batches.stages == 1:
            return True
        in_stages = request.last_plan > new.plan_id - self.batches.stages
        if new.quota[decodes] <= 0 or (request.unread and in_stages and not early):
            return False
        new.quota[decodes] -= 1
        return True

    def _continue_running(self, new: _NewPlan, early: bool) -> bool:
        """Plan rows of the running requests. Returns whether waiting ones may start: not after a preemption, and not if
        the budget did not reach for all."""
        in_turn = list(self.running)
        if self.batches.stages > 1:  # a plan takes a share of them: those whose last plan is the oldest come first
            in_turn.sort(key=lambda request: request.last_plan)
        for request in in_turn:
            preempted, due = request.slot < 0, request.tokens_to_compute
            # An exclusive request has one plan in flight: with more, it could need more than the pool has.
            if preempted or not due or (request.exclusive and self._in_flight) or self.drafts.waits(request):
                continue
            if new.budget == 0:
                return False
            # One token of text needs only room in the plan.
            count = self._allowed_tokens(request, due, new.budget) if due > 1 or request.message.media else 1
            if not count or not self._take_quota(new, request, due == 1, early):
                continue
            # The bound on what an exclusive request holds (``slabs_for``) is one without drafts.
            proposed = [] if request.exclusive else self.drafts.propose(request, new.budget - count)
            drafted = proposed and self.grammars.fitting(request, proposed)
            if drafted and self._plan_row(new, request, count, drafted):
                continue
            while not self._plan_row(new, request, count, []):
                if not self._make_room(new, request):
                    return False
        return len(self.running) == len(in_turn)  # a preempted request no longer runs

    def _make_room(self, new: _NewPlan, request: Request) -> bool:
        """Free blocks for a row of ``request``, which the pool had too few for. First the connector gives up those that
        it holds for waiting requests; then the request that started last, of those without a row in the plan, is
        preempted. False if ``request`` has to wait, because that one is in flight, or is ``request`` itself."""
        if self.connector.give_back():
            return True
        has_row = [row.request for row in new.rows]
        victim = next(r for r in reversed(self.running) if r not in has_row)
        # Its plans in flight are read first. That is soon: it gets no new row.
        if self._is_in_flight(victim):
            return False
        # With blocks of several sizes a fragmented pool may have no place for a request that would fit: it starts over
        # in an empty pool.
        victim.exclusive = victim is self.running[0] and not self._in_flight
        self._preempt(victim)
        return victim is not request

    def _admit_waiting(self, new: _NewPlan) -> None:
        self.waiting.sort(key=priority_and_age)
        while self._slots and new.budget and not any(r.exclusive for r in self.running):
            request = self.adapters.startable(filter(self._is_ready, self.waiting))
            if request is None or not self._take_quota(new, request, decodes=False):
                return
            # While others run, an exclusive request waits, and so does one that did not fit until pages become free.
            if self._busy and (request.exclusive or self._last_blocked == (request.id, self.state.pool.free)):
                return
            copies = open_state(self.state, request)
            self.connector.started(request)
            request.slot, request.adapter = self._slots.pop(), self.adapters.start(request.message.adapter)
            count = self._allowed_tokens(request, request.tokens_to_compute, new.budget)
            if not count or not self._plan_row(new, request, count, [], admit=True):
                self._release(request)
                if not count:
                    return  # this step has no more room for its media, or for a text that is not divided
                if not (self._busy or request.exclusive):
                    request.exclusive = not self.connector.give_back()
                    continue
                self._last_blocked = (request.id, self.state.pool.free)
                return
            self.waiting.remove(request)
            self.running.append(request)
            self._record_admission(new, request, copies)

    def _is_ready(self, request: Request) -> bool:
        waits = request.waits_for_parent or not self.grammars.ready(request)
        return not waits and self.connector.ready(request, self._busy)

    def _record_admission(self, new: _NewPlan, request: Request, copies: list[BlockCopy] | None) -> None:
        """Count how much state a request starts with, and plan the copies from its parent."""
        reused, parent = request.computed, request.parent
        request.parent = None
        if copies is None or parent is None:
            self.stats.queried_tokens += request.length
            self.stats.prefix_hits += reused > 0
            self.stats.cached_tokens += reused
        else:
            parent.last_plan = new.plan_id
            new.copies += copies
            self.stats.forks += 1
            self.stats.forked_tokens += reused
        if not request.preemptions:
            request.cached, request.started = reused, time.monotonic()
            self.stats.record_queue_time(request.started - request.arrived)

    def _plan_row(self, new: _NewPlan, request: Request, count: int, drafted: list[int], admit: bool = False) -> bool:
        """Add a row of ``count`` tokens and the ``drafted`` ones after them to the plan; False, with nothing changed,
        if the pool has too few blocks."""
        assert request.table is not None, "a running request has a table"
        samples = 1 + len(drafted) if request.computed + count == len(request.tokens) + request.unread else 0
        recomputed, count = request.checked and max(0, request.checked - request.computed), count + len(drafted)
        if (growth := self.state.grow(request.table, request.computed + count, len(drafted))) is None:
            return False
        if admit:
            known, sampling = list(request.tokens), request.message.sampling
            new.admissions.append(Admission(request.slot, known, sampling, request.prompt_length, request.adapter))
            new.updates.append(TableUpdate(request.slot, 0, [list(b) for b in request.table.blocks]))
        elif growth.blocks:
            new.updates.append(TableUpdate(request.slot, growth.start, [list(b) for b in growth.blocks]))
        self.media.take(request, count)
        new.rows.append(PlannedRow(request, request.computed, count, drafted, samples, recomputed))
        new.budget = max(0, new.budget - (count if request.plain else new.rows[-1].cost))
        return True

    def _is_in_flight(self, request: Request) -> bool:
        """Whether a plan in flight has a row of this request or copies its blocks."""
        return bool(self._in_flight) and request.last_plan >= self._in_flight[0].plan.id

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks and slot. It keeps its tokens and waits until its state can be computed again."""
        assert request.unread == 0, "a request with an unread token is not preempted"
        self.running.remove(request)
        self._release(request)
        request.preemptions += 1
        self.stats.preemptions += 1
        self.waiting.append(request)

    def _release(self, request: Request) -> None:
        assert request.table is not None
        self.state.close(request.table)
        self.media.release(request)
        self.adapters.stop(request.message.adapter)
        self._slots.append(request.slot)
        request.table, request.slot, request.computed, request.checked = None, -1, 0, 0

    def _build_plan(self, new: _NewPlan) -> Plan:
        # State providers may compute rows of one token with another kernel, so these come first.
        rows = new.rows
        rows.sort(key=lambda row: row.count > 1)
        for row in rows:
            request = row.request
            request.computed, request.last_plan = row.start + row.count - len(row.drafts), new.plan_id
            request.unread, request.unchecked = request.unread + (row.samples > 0), bool(row.drafts)
        scores, outputs = wanted_outputs(rows)
        wanted = [row.request.message.sampling for row in rows for _ in range(row.samples)]
        if wanted != self._wanted:  # they seldom differ from those of the plan before
            self._wanted, self._sampling = wanted, _sample_plan(wanted)
        scorers = (rows[each.row].request.message.sampling for each in scores)
        plan = Plan(
            id=new.plan_id, adapters=self.adapters.writes(), adapted=any(row.request.adapter >= 0 for row in rows),
            admissions=new.admissions, updates=new.updates, copies=new.copies,
            slots=[row.request.slot for row in rows], starts=[row.start for row in rows],
            counts=[row.count for row in rows], samples=[i for i, row in enumerate(rows) for _ in range(row.samples)],
            drafts=[DraftedTokens(i, row.drafts) for i, row in enumerate(rows) if row.drafts], sampling=self._sampling,
            scores=scores, top_scores=min(max((s.prompt_logprobs or 0 for s in scorers), default=0), MAX_LOGPROBS),
            outputs=outputs, media=self.media.build_step_media(rows), moves=self.connector.moves(),
        )  # fmt: skip
        self._next_plan += 1
        self._in_flight.append(_SubmittedPlan(plan, rows, self.drafts.on))
        self.stats.steps += 1
        self.stats.computed_tokens += sum(plan.counts)
        decoding = sum(row.start >= row.request.prompt_length for row in rows)
        self.stats.mixed_steps += 0 < decoding < len(rows)
        return plan

    def retire(self, result: StepResult) -> list[FromController]:
        """Apply the result of the oldest plan: append the sampled ids to their requests, let full blocks enter the
        prefix cache, and release requests that have ended. Returns the events for the front end."""
        submitted = self._in_flight.popleft()
        assert submitted.plan.id == result.plan, f"plan {submitted.plan.id} is the oldest in flight, not {result.plan}"
        self.connector.done(result.transfers)
        self.stats.counters.update({**result.counters, **self.connector.counters})
        found = results_by_row(submitted.plan, submitted.rows, result)
        events: list[FromController] = []
        for each in found:
            if each.row.request.finish is None:
                self._append_tokens(each.row, each.ids)
                events += self._token_events(each)
        self.drafts.record([each.row for each in found], submitted.drafts, sum(len(each.ids) for each in found))
        self._release_finished(result.plan)
        return events

    def _append_tokens(self, row: PlannedRow, ids: list[int]) -> None:
        """Append to a request what it got from a row, and note how much of its state exists."""
        request = row.request
        request.tokens += ids
        request.unread -= row.samples > 0
        computed = row.start + row.count
        request.outputs_read = max(request.outputs_read, computed)
        if row.drafts:
            request.unchecked, request.checked = False, len(request.tokens) - 1
            computed = request.computed = self.state.kept(computed - len(row.drafts), request.checked)
            self.stats.drafts += row.drafts[0] > NOT_YET
            self.stats.drafted_tokens += sum(id > NOT_YET for id in row.drafts)
            self.stats.accepted_tokens += len(ids) - 1
        assert request.table is not None
        self.state.commit(request.table, request.tokens, computed)

    def _token_events(self, found: RowResult) -> list[FromController]:
        """What the front end is told of a row: new tokens and what comes with them, and the request's end if this was
        its last token."""
        request, ids, scores = found.row.request, found.ids, found.scores
        if not ids and scores is None and not found.outputs:
            return []
        s = request.message.sampling
        request.scored += len(scores or ())
        # The step computed as many likeliest tokens as its most demanding row wants; each gets what it asked for.
        wanted = len(s.logprob_ids) or s.logprobs or 0
        tokens = Tokens(
            id=request.id, ids=[] if found.vector else ids, cached=request.cached, pooled=found.vector + found.outputs,
            queued=request.started - request.arrived,
            logprobs=[e.likeliest(wanted) for e in found.logprobs] if found.logprobs else None,
            prompt_logprobs=None if scores is None else [e.likeliest(s.prompt_logprobs or 0) for e in scores],
        )  # fmt: skip
        stopped = bool(ids) and ids[-1] in request.stop_ids
        if stopped or (ids and len(request.tokens) >= request.limit):
            return [tokens, self._finish(request, "stop" if stopped else "length")]
        return [tokens]

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None, status: int = 503) -> Finished:
        request.finish = reason
        self.connector.dropped(request)
        del self._requests[request.id]
        self.stats.finished += 1
        self.stats.preempted[min(request.preemptions, len(self.stats.preempted) - 1)] += 1
        if request.slot < 0:
            self.waiting.remove(request)
            self.adapters.close(request.message.adapter)
        else:
            self.running.remove(request)
            self._pending_release.append(request)
            if not self._is_in_flight(request):
                self._release_finished(request.last_plan)
        return Finished(id=request.id, reason=reason, error=error, status=status)

    def _release_finished(self, retired: int) -> None:
        """Release the finished requests whose last plan is ``retired`` or older."""
        for request in [each for each in self._pending_release if each.last_plan <= retired]:
            self._pending_release.remove(request)
            self._release(request)
            self.adapters.close(request.message.adapter)
