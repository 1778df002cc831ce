"""What the scheduler and the controller ask about the grammars of requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from evener.engine.wire.messages import NewRequest
from evener.engine.wire.plan import Plan, StepResult


class Sequence(Protocol):
    """What is read of a scheduler's request."""

    slot: int
    message: NewRequest

    @property
    def id(self) -> str:
        """Its id."""


class Grammars:
    """The grammars of an engine in which no request has one; ``GrammarMasks`` is another."""

    def ready(self, request: Sequence) -> bool:
        """Whether the request may start. If its grammar is new, it is being compiled from now on."""
        return request.message.sampling.grammar is None

    def masked(self, plan: Plan) -> Plan:
        """``plan`` with the masks of its rows. Called once for each plan, in order."""
        return plan

    def sampled(self, result: StepResult) -> StepResult:
        """Takes note of the ids that the oldest of those plans has sampled; returns ``result``."""
        return result

    def failures(self, running: Iterable[Sequence]) -> list[tuple[str, str]]:
        """Ids of the requests that cannot follow their grammar, or not any further, each once, with reasons."""
        return []
