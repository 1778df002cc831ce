"""What the scheduler and the controller ask about the grammars of requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from evener.config.schema import Config
from evener.engine.wire.executor import Executor
from evener.engine.wire.messages import NewRequest
from evener.engine.wire.plan import Plan, StepResult
from evener.plugins.discover import installed_catalog


class Sequence(Protocol):
    """The fields of a scheduler's request that are read here."""

    slot: int
    message: NewRequest

    @property
    def id(self) -> str:
        """Its id."""


class Grammars:
    """The grammars of an engine in which no request can have one; ``open_grammars`` finds others."""

    #: The newest plan while its masks are not made. No other plan may be made then.
    owed: Plan | None = None

    def ready(self, request: Sequence) -> bool:
        """Whether the request may start. If its grammar is new, it is being compiled from now on."""
        return True

    def fitting(self, request: Sequence, drafts: list[int]) -> list[int]:
        """The proposed tokens of a request that may come next. All its tokens were read."""
        return drafts

    def prepare(self, plan: Plan) -> Plan:
        """The plan to submit: ``plan``, in which ``masked`` lists the samples that wait for a mask. Called once for
        each plan, in order; the controller submits the result and then calls ``submitted``."""
        return plan

    def submitted(self, executor: Executor) -> None:
        """The executor has the plan of the last ``prepare``. Its masks follow now, or in ``read`` once the tokens that
        they depend on were read."""

    def read(self, executor: Executor) -> StepResult:
        """The result of the oldest plan."""
        return executor.read()

    def failures(self, running: Iterable[Sequence]) -> list[tuple[str, str]]:
        """Ids of the requests that cannot follow their grammar, or not any further, each once, with reasons."""
        why = "structured output needs a package that is not installed; type: pip install evener-generation"
        return [(request.id, why) for request in running if request.message.sampling.grammar is not None]


def open_grammars(config: Config, vocab_size: int) -> Grammars:
    """The grammars of an installed package, which makes the masks, for a model of ``vocab_size`` ids."""
    found = installed_catalog().lazy_imports("maker of masks")
    return Grammars() if not found else found[min(found)].load()(config, vocab_size)
