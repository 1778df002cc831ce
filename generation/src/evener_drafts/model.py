"""The draft model of speculative decoding (``infer.draft_model``): a second, smaller model in the same worker.

Its layers have state groups of their own in the same pool, and share the requests' tables. So a prefix cache hit, a
fork or a preemption gives or takes the state of both models. In each plan it runs before the model:

1. It computes the plan's tokens too, except proposed ones, so that it has state wherever the model has.
2. For rows with proposed tokens it goes on alone, one token for each of these rows at a time. Each step leaves the
   likeliest token where the model's row of the same plan, which checks it, expects it.

If plans have no proposed tokens, it rests soon (``rest``): it computes nothing. Later it lacks the state of some tokens
(``computed``). Once a plan has proposed tokens again, it computes these first, as many in a plan as a step may have,
the rows with the fewest first. To a row that has to wait it answers ``NOT_YET``: the model checks whatever tokens are
in their place, and none of them counts.

Where one of its layers has a window, blocks are freed as the model goes on, and with them what tokens in between would
read. So such a model rests later, and to a request of which it has missed more than the window keeps it answers
``NEVER``.

Its steps are ordinary plans, which a runner of its own executes over the same tables. No step computes the last
proposed token of a row, unless a block is freed behind it. If that one was right, the next plan computes it as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from evener.contracts.generation.drafts import NEVER, NOT_YET
from evener.engine.inputs.step_layout import StepArrays, StepShape
from evener.engine.sampling.pending import PendingStep
from evener.engine.wire.plan import Plan
from evener.engine.worker.assembly import Assembly
from evener.engine.worker.geometry import Geometry
from evener.engine.worker.graphs import StepGraphs
from evener.engine.worker.runner import ForwardStep, Runner
from evener_drafts.computed import ComputedTokens
from evener_drafts.rest import LONG, SHORT, Rest


class DraftRunner(Runner):
    """Runs the draft model. Its vocabulary may lack the model's last ids: it reads its own last one in their place."""

    def step(self, shape: StepShape, arrays: StepArrays) -> ForwardStep:
        step = super().step(shape, arrays)
        step.token_ids = step.token_ids.clamp(max=self.model.vocab_size - 1)
        return step


def own_geometry(a: Assembly) -> Geometry:
    """The model's state groups, with the layers of what drafts only."""
    assert a.draft is not None, "it was declared"
    own = set(map(id, a.draft.build.slots))
    groups = [dataclasses.replace(g, slots=tuple(s for s in g.slots if id(s) in own)) for g in a.geometry.groups]
    return dataclasses.replace(a.geometry, groups=tuple(groups))


class DraftModel:
    """The draft model's part of each plan.

    Args:
        a: the model's assembly, which has the draft model's.
        model: the model's runner, whose tables both use.

    Attributes:
        runner: runs the draft model.
        graphs: its captured steps; None: they run eagerly.
    """

    def __init__(self, a: Assembly, model: Runner) -> None:
        assert a.draft is not None, "it was declared"
        own = own_geometry(a)
        self.runner = DraftRunner(a.device, a.draft.model, a.draft.sampler, model.tables, own, a.adapters)
        self._apply, self._step_tokens = model.apply, a.config.step_tokens
        self.graphs: StepGraphs | None = None
        groups = [index for index, group in enumerate(own.groups) if group.slots]
        self._computed = ComputedTokens(a, groups, brought=False)
        self._rest = Rest(LONG if self._computed.drops else SHORT)

    def run(self, plan: Plan) -> tuple[Plan, Callable[[], list[list[int]]] | None]:
        """Run the draft model for a plan. Returns the plan that is left to the model, and what waits for the tokens
        that were proposed for each of ``plan.drafts``; None: it has none."""
        self._computed.apply(plan)
        lengths = {draft.row: len(draft.ids) for draft in plan.drafts}
        rows = range(len(plan.slots)) if self._rest.ends(plan) else ()
        lost = {row for row in rows if not self._computed.reaches(plan.slots[row], plan.starts[row])}
        steps = list[tuple[Sequence[int], PendingStep]]()
        certain = {row: plan.starts[row] + plan.counts[row] - lengths.get(row, 0) for row in rows if row not in lost}
        if due := dict(certain):
            self._apply(plan)
            plan = replace(plan, adapters=[], admissions=[], updates=[], copies=[])
        while due:
            steps += self._compute(plan, due, lengths)
            due = self._late(plan, certain)

        def proposed() -> list[list[int]]:
            found: dict[int, list[int]] = {}
            for rows, step in steps:
                for row, token in zip(rows, step.wait().ids, strict=True):
                    found.setdefault(row, []).append(token)
            return [found.get(row, [NEVER if row in lost else NOT_YET] * n) for row, n in lengths.items()]

        return plan, proposed if lengths else None

    def _late(self, plan: Plan, certain: Mapping[int, int]) -> dict[int, int]:
        """The rows with tokens, up to which ones, whose state could not be made in a later plan."""
        ends = {row: plan.starts[row] + plan.counts[row] for row in certain}
        late = [row for row, end in ends.items() if not self._computed.reaches(plan.slots[row], end)]
        return {row: certain[row] if self._computed.length(plan.slots[row]) < certain[row] else ends[row]
                for row in late}  # fmt: skip

    def _compute(
        self, plan: Plan, due: Mapping[int, int], lengths: Mapping[int, int]
    ) -> list[tuple[Sequence[int], PendingStep]]:
        """One step for rows whose tokens are ``due`` up to these, and the steps that propose tokens for those that get
        all their certain ones."""
        ends = [start + count for start, count in zip(plan.starts, plan.counts, strict=True)]
        first = {row: self._computed.length(plan.slots[row]) for row in due}
        spans, left = dict[int, range](), self._step_tokens
        for row in sorted(due, key=lambda row: due[row] - first[row]):
            if span := range(first[row], min(due[row], first[row] + left)):
                spans[row], left = span, left - len(span)
        rows = sorted(spans, key=lambda row: (len(spans[row]) > 1, row))  # as the scheduler orders them
        ready = [row for row in rows if row in lengths and spans[row].stop == ends[row] - lengths[row]]
        starts, counts = [spans[row].start for row in rows], [len(spans[row]) for row in rows]
        steps = [self._execute(plan, rows, starts, counts, ready)]
        for at in range(1, max((lengths[row] for row in ready), default=0)):
            longer = [row for row in ready if lengths[row] > at]
            last = [ends[row] - lengths[row] + at - 1 for row in longer]
            steps.append(self._execute(plan, longer, last, [1] * len(longer), longer))
        for row in rows:
            self._computed.extend(plan.slots[row], spans[row].stop + (lengths[row] - 1 if row in ready else 0))
        return steps

    def _execute(
        self, plan: Plan, rows: Sequence[int], starts: list[int], counts: list[int], samples: Sequence[int]
    ) -> tuple[Sequence[int], PendingStep]:
        """A step of some of the plan's ``rows``, of which ``samples`` sample the likeliest token; and these."""
        places = {row: place for place, row in enumerate(rows)}
        own = Plan(id=plan.id, slots=[plan.slots[row] for row in rows], starts=starts, counts=counts,
                   samples=[places[row] for row in samples])  # fmt: skip
        step = (self.graphs and self.graphs.execute(own)) or self.runner.execute(own)
        assert isinstance(step, PendingStep), "only steps with masks wait"
        return samples, step
