"""The plan of one step and its result, as plain data. The controller sends plans, the worker sends results.

The worker keeps the token ids, block tables and sampling parameters of up to ``max_reqs`` requests on the device. Each
request has a *slot*, the row of those tables that belongs to it. A plan carries only what changed since the last one.
A *row* of a plan is one request's part of the step; ``slots``, ``starts`` and ``counts`` are parallel lists of rows.
"""

from __future__ import annotations

import msgspec

from evener.contracts.connector import BlockMoves
from evener.engine.wire.media import StepMedia
from evener.engine.wire.messages import Command, LoadAdapter, Sampling, TokenLogprobs, UnloadAdapter


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """A request takes a slot: its known tokens, its sampling parameters, the length of its prompt in tokens, and the
    slot of its adapter, -1 if it has none."""

    slot: int
    tokens: list[int]
    sampling: Sampling
    prompt: int = 0
    adapter: int = -1


class TableUpdate(msgspec.Struct, frozen=True, array_like=True):
    """New entries of one slot's block tables, from column ``start`` on. ``blocks`` has one list of block ids for each
    state group, all of the same length."""

    slot: int
    start: int
    blocks: list[list[int]]


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copy one block of one state group, from id ``source`` to id ``target``: the partly filled block that a fork takes
    over from its parent."""

    group: int
    source: int
    target: int


class AdapterWrite(msgspec.Struct, frozen=True, array_like=True):
    """The adapter with this id takes an adapter slot in place of another one. All its tensors were sent before."""

    slot: int
    adapter: str


class ScoredTokens(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens whose log-probabilities are wanted: ``count`` tokens of a plan's row, from its token ``first`` on.
    The logits of each score the prompt token after it."""

    row: int
    first: int
    count: int


class WantedOutputs(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of which outputs are wanted: ``count`` tokens of a plan's row, from its token ``first`` on. ``kind``: as
    in ``PromptOutputs``; or "scored" or "sampled": logits for ``Tokens.pooled``, of prompt tokens or samples."""

    row: int
    first: int
    count: int
    kind: str


class DraftedTokens(msgspec.Struct, frozen=True, array_like=True):
    """The last tokens of a plan's row are ``ids``, which were proposed and may be wrong. If they are ``BY_WORKER``, the
    worker's draft model proposes them and reports them in ``StepResult.drafts``."""

    row: int
    ids: list[int]


class SamplePlan(msgspec.Struct, frozen=True, kw_only=True):
    """How the samples of a plan are drawn. Each list has indices into ``Plan.samples``.

    Attributes:
        random: the samples that are not greedy; filtered: whether one of them uses top-k, top-p or min-p.
        logprobs: the samples that want log-probabilities; ``top_logprobs``: the largest number of likeliest tokens
            that one of them wants; ``named``: for each, the ids that it wants instead; empty if none names any.
        penalized, biased: the samples with a penalty, and with a logit bias.
    """

    random: list[int] = []
    filtered: bool = False
    logprobs: list[int] = []
    top_logprobs: int = 0
    named: list[list[int]] = []
    penalized: list[int] = []
    biased: list[int] = []


class Plan(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """One step.

    Attributes:
        id: counts up by one.
        adapters, admissions, updates, copies: applied in this order, before the rows run.
        adapted: whether a row has an adapter.
        slots, starts, counts: of each row, its slot, the position of its first token and its number of tokens.
        drafts: the rows that end with proposed tokens.
        samples: indices of the rows that sample a token, which gets position ``start + count``. A row with n proposed
            tokens is there n + 1 times: it samples after its last certain token and after each proposed one.
        sampling: how they are drawn.
        masked: indices into ``samples`` of the requests with a grammar. If there are any, a ``StepMasks`` follows.
        scores: prompt tokens to score; ``top_scores``: as ``top_logprobs`` of ``SamplePlan``, for these.
        outputs: prompt tokens of which rows are returned.
        media: the media of the step; None if it has none.
        moves: what the connector does before the rows run; None: nothing.
    """

    id: int
    adapters: list[AdapterWrite] = []
    adapted: bool = False
    admissions: list[Admission] = []
    updates: list[TableUpdate] = []
    copies: list[BlockCopy] = []
    slots: list[int] = []
    starts: list[int] = []
    counts: list[int] = []
    drafts: list[DraftedTokens] = []
    samples: list[int] = []
    sampling: SamplePlan = SamplePlan()
    masked: list[int] = []
    scores: list[ScoredTokens] = []
    top_scores: int = 0
    outputs: list[WantedOutputs] = []
    media: StepMedia | None = None
    moves: BlockMoves | None = None


class StepMasks(msgspec.Struct, frozen=True, kw_only=True, tag="masks"):
    """Which ids the samples ``Plan.masked`` of a plan may take: one mask for each, bytes or a memoryview, as a
    ``Matcher`` of ``evener.contracts.grammar`` packs them. Sent after the plan and before the next one: a mask depends
    on the token before it, which is read while the worker computes the hidden states."""

    plan: int
    masks: list[object]


#: What the controller sends the worker.
Order = Plan | StepMasks | LoadAdapter | UnloadAdapter | Command


class StepResult(msgspec.Struct, frozen=True, kw_only=True, tag="result"):
    """The result of one step, or of a ``Command``.

    Attributes:
        plan: the plan's id.
        ids: one for each of ``Plan.samples``; without a meaning if the model embeds.
        logprobs, scores: log-probabilities for each of ``SamplePlan.logprobs``, and for each token of ``Plan.scores``.
        pooled: of a model that embeds: the row of each of ``Plan.samples``, float32 in the host's byte order.
        outputs: the rows of each of ``Plan.outputs``, in the same form.
        drafts: if the worker proposed them, the ids of each of ``Plan.drafts``: ``BY_WORKER`` in place of those that do
            not count, ``NOT_YET`` or ``NEVER`` if it made none. A step with drafts that waits for its masks first has a
            result with these alone (``proposed``).
        counters: those of this worker's ``Placement`` and ``BlockMover``.
        transfers: those of the ``BlockMover`` that are over, each reported once.
        error: why the worker could not do the command.
    """

    plan: int
    ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    scores: list[TokenLogprobs] = []
    pooled: list[bytes] = []
    outputs: list[bytes] = []
    drafts: list[list[int]] = []
    counters: dict[str, int] = {}
    transfers: list[int] = []
    error: str | None = None

    @property
    def proposed(self) -> bool:
        """Whether the result only has the proposed drafts: the step has yet to sample."""
        return bool(self.drafts) and not self.ids
