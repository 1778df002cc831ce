"""A request as the scheduler sees it, its part of a plan, and what the plan's result has for it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from evener.contracts.outputs import FinishReason
from evener.engine.controller.state import BlockTable
from evener.engine.wire.messages import NewRequest, TokenLogprobs
from evener.engine.wire.plan import Plan, ScoredTokens, StepResult, WantedOutputs
from evener.sampling_params import MAX_LOGPROBS

#: A token whose whole row of logits is copied to the host counts as so many in a step's budget: a row may take a
#: megabyte.
_WHOLE_ROW = 128


@dataclass(eq=False)
class Request:
    """One sequence from its arrival to its terminal event.

    Attributes:
        message: the request as the front end sent it.
        order: position in the order of arrival.
        tokens: known ids: the prompt, and the sampled ids that were read.
        unread: number of tokens that submitted plans sample and whose ids were not read yet.
        computed: number of tokens whose state is computed, or will be by the plans in flight; it may also be the prefix
            cache's or a parent's.
        checked: number of tokens that plans have computed, accepted drafts included. Where their state was not kept,
            the next plan computes them again.
        unchecked: whether a plan in flight has drafts of it. How many are accepted decides where the next plan begins.
        cached: prompt tokens that came from the prefix cache or from a parent when the request first started.
        scored: number of prompt tokens, from the second on, whose log-probabilities were read.
        outputs_read: prompt outputs of tokens before this position were read.
        preemptions: how often the request was preempted.
        last_plan: id of the last plan with a row of this request; -1 before the first.
        slot, table: held while the request runs; -1 and None otherwise.
        adapter: slot of its adapter; valid while the request runs; -1 if it has none.
        exclusive: the request must have the whole pool for itself.
        parent, shared: the request to start from, and how many tokens both have in common; see ``forks``.
        fork_points: lengths at which a step has to end, because a fork starts there.
        finish: why the request ended; None while it is open. Set once, together with the terminal event.
        arrived, started: when it arrived and when it first ran, in seconds of ``time.monotonic``.
        limit: number of tokens at which it ends: the prompt and ``max_tokens``.
        plain: whether only sampled tokens are wanted, each with at most ``MAX_LOGPROBS`` log-probabilities.
    """

    message: NewRequest
    order: int
    tokens: list[int] = field(default_factory=list)
    unread: int = 0
    computed: int = 0
    checked: int = 0
    unchecked: bool = False
    cached: int = 0
    scored: int = 0
    outputs_read: int = 0
    preemptions: int = 0
    last_plan: int = -1
    slot: int = -1
    adapter: int = -1
    exclusive: bool = False
    table: BlockTable | None = None
    parent: Request | None = None
    shared: int = 0
    fork_points: set[int] = field(default_factory=set)
    finish: FinishReason | None = None

    def __post_init__(self) -> None:
        self.id, self.tokens = self.message.id, list(self.message.prompt)
        self.arrived = self.started = time.monotonic()
        self.prompt_length = len(self.tokens)
        self.limit = self.prompt_length + self.message.max_tokens
        self.stop_ids = frozenset(self.message.stop_token_ids)
        s = self.message.sampling
        self.plain = not (s.prompt_outputs or s.prompt_logprobs is not None or (s.logprobs or 0) > MAX_LOGPROBS)

    @property
    def length(self) -> int:
        """Tokens that exist: known and unread ones."""
        return len(self.tokens) + self.unread

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still missing."""
        return self.message.sampling.prompt_logprobs is not None and self.scored < self.prompt_length - 1

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether the prompt has to be computed, even if its state is cached."""
        rows = self.message.sampling.prompt_outputs
        return self.message.whole_prompt or self.wants_prompt_logprobs or bool(rows and self.outputs_read < rows.end)

    def outputs_of(self, index: int, start: int, end: int) -> Iterator[WantedOutputs]:
        """The outputs wanted of the tokens from ``start`` to before ``end``, which are row ``index`` of a plan."""
        wanted, start_unread = self.message.sampling.prompt_outputs, max(start, self.outputs_read)
        if wanted is not None and start_unread < wanted.end:
            for first, last in wanted.ranges:
                if (low := max(first, start_unread)) < (high := min(last, end)):
                    yield WantedOutputs(index, low - start, high - low, wanted.kind)

    @property
    def token_cost(self) -> int:
        """How much of a step's budget each token of the prompt takes."""
        wanted = 0 if self.plain else self.message.sampling.prompt_logprobs or 0
        return _WHOLE_ROW if wanted > MAX_LOGPROBS and self.wants_prompt_logprobs else 1

    @property
    def tokens_to_compute(self) -> int:
        """Tokens that the next plan may compute. The last token that the limit allows is sampled and never computed."""
        length = len(self.tokens) + self.unread
        if self.unchecked or length >= self.limit:
            return 0
        if self.computed in self.fork_points:
            return 1  # leaves the step's budget to the forks
        later = [p for p in self.fork_points if p > self.computed] if self.fork_points else ()
        return (min(later) if later else length) - self.computed

    @property
    def decodes(self) -> bool:
        """Whether exactly one token is left to compute, after which the next plan samples, and no fork needs a step to
        end there or later."""
        forks = any(point >= self.computed for point in self.fork_points)
        return self.tokens_to_compute > 0 and not forks and self.length - 1 == max(self.computed, self.checked)

    @property
    def waits_for_parent(self) -> bool:
        """Whether its parent has yet to compute the tokens that both share."""
        return self.parent is not None and self.parent.finish is None and self.parent.computed < self.shared


class PlannedRow(msgspec.Struct, frozen=True):
    """One request's part of a plan: ``count`` tokens from position ``start`` on.

    Attributes:
        drafts: proposed ids, which are the last of these tokens.
        recomputed: how many of these tokens were computed before, but their state was not kept (``Request.checked``).
        samples: the number of tokens that the row samples: one if it computes the last token that exists, and one
            after each proposed id.
    """

    request: Request
    start: int
    count: int
    drafts: list[int]
    samples: int
    recomputed: int = 0

    @property
    def cost(self) -> int:
        """How much of the step's budget the row takes."""
        whole = not self.request.plain and (self.request.message.sampling.logprobs or 0) > MAX_LOGPROBS
        return self.count * self.request.token_cost + (_WHOLE_ROW * self.samples if whole else 0)

    def scores(self, index: int) -> Iterator[ScoredTokens]:
        """The prompt tokens to score in it, as row number ``index`` of a plan, without those whose scores were read
        before a preemption."""
        if self.request.wants_prompt_logprobs:
            first = max(0, self.request.scored - self.start)
            count = min(self.count, self.request.prompt_length - 1 - self.start) - first
            yield from [ScoredTokens(index, first, count)] if count > 0 else []

    def outputs(self, index: int, scores: Iterable[ScoredTokens]) -> Iterator[WantedOutputs]:
        """The outputs that are wanted of it, as row number ``index`` of a plan with these ``scores``."""
        sampling = self.request.message.sampling
        yield from self.request.outputs_of(index, self.start, self.start + self.count)
        if (sampling.prompt_logprobs or 0) > MAX_LOGPROBS:
            yield from (WantedOutputs(index, each.first, each.count, "scored") for each in scores)
        if (sampling.logprobs or 0) > MAX_LOGPROBS and self.samples:
            yield WantedOutputs(index, self.count - self.samples, self.samples, "sampled")

    def accepted(self, ids: list[int]) -> list[int]:
        """Those of the sampled ``ids`` that the request gets: up to the first that differs from its draft, because
        later ones were sampled after a wrong token, and none after a stop token."""
        if len(ids) < 2:
            return ids
        kept = next((at for at, (id, draft) in enumerate(zip(ids, self.drafts, strict=False)) if id != draft), len(ids))
        stop = next((at for at, id in enumerate(ids) if id in self.request.stop_ids), len(ids))
        return ids[: min(kept, stop) + 1]


def wanted_outputs(rows: Iterable[PlannedRow]) -> tuple[list[ScoredTokens], list[WantedOutputs]]:
    """The prompt tokens to score in the rows of a plan, and the outputs that are wanted of the rows."""
    scores, outputs = list[ScoredTokens](), list[WantedOutputs]()
    for index, row in enumerate(rows):
        if not row.request.plain:
            scores += (scored := list(row.scores(index)))
            outputs += row.outputs(index, scored)
    return scores, outputs


class RowResult(msgspec.Struct, frozen=True):
    """What a step's result has for one row.

    Attributes:
        row: with the drafts that the worker proposed, if it did.
        ids: the sampled ids that the request gets.
        logprobs: of those ids that want any; scores: of the prompt tokens to score, None if there are none.
        vector: the row's vector, of a model that embeds; outputs: the outputs that are wanted of the row.
    """

    row: PlannedRow
    ids: list[int]
    logprobs: Sequence[TokenLogprobs]
    scores: list[TokenLogprobs] | None
    vector: bytes
    outputs: bytes


def results_by_row(plan: Plan, rows: Sequence[PlannedRow], result: StepResult) -> list[RowResult]:
    """What ``result`` has for each of the plan's ``rows``."""
    found, first = list[RowResult](), 0
    drafts, vectors, scores = iter(result.drafts), iter(result.pooled), iter(result.scores)
    outputs = list(zip(plan.outputs, result.outputs, strict=True))
    logprobs = dict(zip(plan.sampling.logprobs, result.logprobs, strict=True))
    scored = {each.row: [next(scores) for _ in range(each.count)] for each in plan.scores}
    for index, row in enumerate(rows):
        if row.drafts and result.drafts:
            row = msgspec.structs.replace(row, drafts=next(drafts))
        ids = row.accepted(result.ids[first : first + row.samples])
        named = [logprobs[at] for at in range(first, first + len(ids)) if at in logprobs] if logprobs else ()
        vector = next(vectors, b"") if row.samples else b""
        # The worker returns logits of each sample, also of those that the request does not get.
        parts = [part[: len(part) // of.count * len(ids)] if of.kind == "sampled" else part
                 for of, part in outputs if of.row == index] if outputs else ()  # fmt: skip
        found.append(RowResult(row, ids, named, scored.get(index), vector, b"".join(parts)))
        first += row.samples
    return found
