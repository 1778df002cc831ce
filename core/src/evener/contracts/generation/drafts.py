"""The contract of a draft policy: which requests of a plan get drafts, and how many tokens.

A package that is pinned to its core's version announces a class in ``Descriptor.draft_policies``. Core takes the first
by name if ``infer.drafter`` or ``infer.draft_model`` is set, and constructs it with ``config.infer`` before weights are
read. It finds the drafter, or raises ConfigError. Its method ``controller`` takes the engine's ``WorkerFacts`` and its
``evener.engine.controller.grammars.Grammars``, and returns a ``Drafts``. The scheduler calls that between two steps, so
it must be quick. Without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

#: What the worker says in place of each id of a draft that it did not make: it lacks state of the text, and computes
#: more of that when it is asked again; or it will lack some as long as the request runs.
NOT_YET, NEVER = -2, -3


class DecodingRequest(Protocol):
    """What is read of a scheduler's request; it can be a key of a ``WeakKeyDictionary``.

    Attributes:
        tokens: known ids: the prompt, and the sampled ids that were read.
        unread: number of tokens that submitted plans sample and whose ids were not read yet.
        planned: number of tokens whose state is computed or will be by submitted plans.
        limit: tokens that it may have in all; the last is sampled and never computed.
    """

    tokens: list[int]
    unread: int
    planned: int
    limit: int

    @property
    def length(self) -> int:
        """Tokens that exist."""

    @property
    def decodes(self) -> bool:
        """Whether the next plan samples behind the only token that no plan has computed yet, and a step need not end
        there or later for a fork."""


class DraftedRow(Protocol):
    """What is read of a plan's row: ``count`` tokens of a request from position ``start`` on, the last of which are
    ``drafts``, and the first ``again`` of which were computed and checked before; the step samples behind its last
    ``samples`` tokens."""

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
    def again(self) -> int: ...


class Drafts:
    """The drafts of an engine that has none; a policy is another.

    Attributes:
        on: whether requests of the plan that is being made get drafts.
    """

    on = False

    def begin(self, requests: int) -> None:
        """A plan of at most so many requests is being made."""

    def waits(self, request: DecodingRequest) -> bool:
        """Whether the request takes no part in this plan, because its next tokens can be proposed once its last one was
        read."""
        return False

    def propose(self, request: DecodingRequest, budget: int) -> list[int]:
        """At most ``budget`` tokens that may come next in a request of the plan."""
        return []

    def record(self, rows: Sequence[DraftedRow], on: bool, tokens: int) -> None:
        """The result of a plan with these rows was read: their requests got ``tokens`` tokens. ``on``: as it was when
        the plan was made."""
