"""Structured output: what the scheduler and the controller ask about the grammars of requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from evener.config.schema import Config
from evener.engine.wire.executor import Executor
from evener.engine.wire.messages import NewRequest
from evener.engine.wire.plan import Plan, StepResult
from evener.plugins.discover import installed_catalog


class Sequence(Protocol):
    """The part of a scheduler's ``Request`` that is read here."""

    slot: int
    message: NewRequest

    @property
    def id(self) -> str:
        """The request's id."""


class Grammars:
    """The grammars of requests. This base class is for an engine without structured output; ``open_grammars`` finds
    the class of a package."""

    #: The newest plan until its masks are made. Until then no other plan may be made.
    awaiting_masks: Plan | None = None

    def ready(self, request: Sequence) -> bool:
        """Whether the request may start: its grammar is compiled. The first call for a new grammar begins that."""
        return True

    def fitting(self, request: Sequence, drafts: list[int]) -> list[int]:
        """The first of the ``drafts`` up to one that the request's grammar forbids. Every token of the request was
        read."""
        return drafts

    def prepare(self, plan: Plan) -> Plan:
        """The plan to submit: ``plan``, in which ``masked`` lists the samples that wait for a mask. Called once for
        each plan, in order; the controller submits the result and then calls ``submitted``."""
        return plan

    def submitted(self, executor: Executor) -> None:
        """The executor has the plan of the last ``prepare``. Its masks are sent now, or in ``read`` once the tokens
        that they depend on were read."""

    def read(self, executor: Executor) -> StepResult:
        """The result of the oldest plan."""
        return executor.read()

    def failures(self, running: Iterable[Sequence]) -> list[tuple[str, str]]:
        """The id and the reason of each request that cannot follow its grammar, or not any further; each once."""
        why = "structured output needs a package that is not installed; type: pip install evener-generation"
        return [(request.id, why) for request in running if request.message.sampling.grammar is not None]


def open_grammars(config: Config, vocab_size: int) -> Grammars:
    """The grammars of the installed package that makes masks, for a vocabulary of ``vocab_size`` ids; without such a
    package, the base class."""
    found = installed_catalog().lazy_imports("maker of masks")
    return Grammars() if not found else found[min(found)].load()(config, vocab_size)
