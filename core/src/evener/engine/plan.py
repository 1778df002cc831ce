"""The plan of one step and its result, as plain data. What crosses between controller and worker.

Rows are parallel lists, in the order of the step's tokens. The worker keeps token ids, block tables and sampling
parameters of up to ``max_reqs`` requests on the device, by *slot*; a plan carries only what changed.
"""

from __future__ import annotations

import msgspec

from evener.engine.messages import Sampling, TokenLogprobs
from evener.media.items import StepMedia


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """A request takes a slot: its known tokens, its sampling parameters and how many of the tokens are its prompt."""

    slot: int
    tokens: list[int]
    sampling: Sampling
    prompt: int = 0


class TableUpdate(msgspec.Struct, frozen=True, array_like=True):
    """New block ids of one slot from column ``start`` on: one list a group."""

    slot: int
    start: int
    blocks: list[list[int]]


class Plan(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """One step.

    Attributes:
        id: counts up by one.
        admissions, updates: applied before the rows run, in this order.
        copies: ``[group, source block, target block]``, applied after them.
        slots, starts, counts: for each row its slot, the position of its first token and how many tokens it computes.
        samples: indices of rows whose last token's logits give a new token, which goes to position start + count.
        random: positions in ``samples`` whose request is not greedy; filtered: whether any of them has a filter on.
        logprobs: positions in ``samples`` that want log-probabilities; ``top_logprobs``: the largest number wanted.
        penalized, biased: positions in ``samples`` with a penalty, and with a bias, on.
        scores: (row, first, count): so many of the row's tokens, from the ``first`` on, score the prompt token that
            follows them; ``top_scores``: the largest number of likeliest tokens wanted there.
        media: what stands for tokens of the step, if anything does.
    """

    id: int
    admissions: list[Admission] = []
    updates: list[TableUpdate] = []
    copies: list[tuple[int, int, int]] = []
    slots: list[int] = []
    starts: list[int] = []
    counts: list[int] = []
    samples: list[int] = []
    random: list[int] = []
    filtered: bool = False
    logprobs: list[int] = []
    top_logprobs: int = 0
    penalized: list[int] = []
    biased: list[int] = []
    scores: list[tuple[int, int, int]] = []
    top_scores: int = 0
    media: StepMedia | None = None


class StepResult(msgspec.Struct, frozen=True, kw_only=True, tag="result"):
    """What a step gave: one id for each of ``Plan.samples``; log-probabilities for each of ``Plan.logprobs`` and each
    token of ``Plan.scores``."""

    plan: int
    ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    scores: list[TokenLogprobs] = []
