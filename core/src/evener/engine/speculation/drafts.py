"""What the scheduler asks about drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from evener.engine.wire.messages import NewRequest


class DecodingRequest(Protocol):
    """What is read of a scheduler's request."""

    message: NewRequest
    tokens: list[int]
    unread: int
    planned: int
    limit: int
    fork_points: set[int]

    @property
    def length(self) -> int:
        """Tokens that exist."""

    @property
    def tokens_to_compute(self) -> int:
        """Tokens that the next plan may compute."""


class DraftedRow(Protocol):
    """What is read of a plan's row; see ``PlannedRow``."""

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


class Drafts:
    """The drafts of an engine that has none; ``Speculation`` is another.

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
