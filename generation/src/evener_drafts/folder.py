"""What the folder of ``infer.draft_model`` holds: a model, or a head that reads the hidden states of this one."""

from __future__ import annotations

from collections.abc import Callable

from evener.engine.wire.plan import Plan
from evener.engine.worker.assembly import Assembly
from evener.engine.worker.graphs import StepGraphs
from evener.engine.worker.runner import Runner
from evener_drafts.declared import declare_draft
from evener_drafts.eagle import EagleDrafter
from evener_drafts.eagle_head import EagleHead
from evener_drafts.model import DraftModel


class DraftFolder:
    """Runs what was declared, whichever it is; see ``DraftModel`` and ``EagleDrafter``."""

    declare = staticmethod(declare_draft)

    def __init__(self, a: Assembly, model: Runner) -> None:
        assert a.draft is not None, "it was declared"
        head = isinstance(a.draft.model, EagleHead)
        self._drafter: EagleDrafter | DraftModel = EagleDrafter(a, model) if head else DraftModel(a, model)
        self.runner = self._drafter.runner

    @property
    def graphs(self) -> StepGraphs | None:
        """Its captured steps; None: they run eagerly."""
        return self._drafter.graphs

    @graphs.setter
    def graphs(self, graphs: StepGraphs | None) -> None:
        self._drafter.graphs = graphs

    def run(self, plan: Plan) -> tuple[Plan, Callable[[], list[list[int]]] | None]:
        """As the drafter does."""
        return self._drafter.run(plan)
