"""The contract of a draft policy: which requests of a plan get drafts, and how many tokens.

A package that is pinned to its core's version announces a class in ``Descriptor.draft_policies``. Core takes the first
by name if ``infer.drafter`` or ``infer.draft_model`` is set, and constructs it with ``config.infer`` before weights are
read. The constructor finds the drafter, or raises ConfigError. The method ``controller`` takes the engine's
``WorkerFacts`` and its ``evener.engine.controller.grammars.Grammars``, and returns a ``Drafts``. The scheduler calls
the ``Drafts`` between two steps, so it must be quick. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

#: In place of each id of a draft that the worker did not make. ``NOT_YET``: it lacks state of the text, and computes
#: more of that when it is asked again. ``NEVER``: it will lack some as long as the request runs.
NOT_YET, NEVER = -2, -3


class DecodingRequest(Protocol):
    """What is read of a scheduler's request; it can be a key of a ``WeakKeyDictionary``.

    Attributes:
        tokens: known ids: the prompt, and the sampled ids that were read.
        unread: number of tokens that submitted plans sample and whose ids were not read yet.
        computed: number of tokens whose state is computed, or will be by the plans in flight.
        limit: tokens that it may have in all; the last is sampled and never computed.
    """

    tokens: list[int]
    unread: int
    computed: int
    limit: int

    @property
    def length(self) -> int:
        """Tokens that exist."""

    @property
    def decodes(self) -> bool:
        """Whether exactly one token is left to compute, after which the next plan samples, and no fork needs a step to
        end there or later."""


class DraftedRow(Protocol):
    """What is read of a plan's row: ``count`` tokens of a request from position ``start`` on, the last of which are
    ``drafts``. The first ``recomputed`` were computed before, but their state was not kept. The step samples after
    each of the last ``samples`` tokens."""

    @property
    def request(self) -> DecodingRequest: ...
    @property
    def start(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def drafts(self) -> Sequence[int]: ...
    @property
    def samples(self) -> int: ...
    @property
    def recomputed(self) -> int: ...


class Drafts:
    """Says which requests get drafts; this base class gives none.

    Attributes:
        on: whether requests of the plan that is being made get drafts.
    """

    on = False

    def begin(self, running: Sequence[DecodingRequest], joining: int) -> None:
        """A plan is about to be made, of requests that run and at most ``joining`` new ones."""

    def waits(self, request: DecodingRequest) -> bool:
        """Whether the request is left out of this plan: its drafts, or those of others that it should share a plan
        with, depend on a token that was not read yet."""
        return False

    def propose(self, request: DecodingRequest, budget: int) -> list[int]:
        """At most ``budget`` tokens that may come next in a request of the plan."""
        return []

    def record(self, rows: Sequence[DraftedRow], on: bool, tokens: int) -> None:
        """The result of a plan with these rows was read: their requests got ``tokens`` tokens. ``on``: as it was when
        the plan was made."""
