"""The draft model of speculative decoding (``infer.draft_model``): a second, smaller model in the same worker.

Its layers have state groups of their own in the same pool, and share the requests' tables. So a prefix cache hit, a
fork or a preemption gives or takes the state of both models. In each plan it runs before the model:

1. It computes the plan's tokens too, except proposed ones, so that it has state wherever the model has.
2. For rows with proposed tokens it goes on alone, one token for each of these rows at a time. Each step leaves the
   likeliest token where the model's row of the same plan, which checks it, expects it.

Its steps are ordinary plans, which a runner of its own executes over the same tables. No step computes the last
proposed token of a row. If that one was right, the first step of the request's next plan computes it as well. Without
such a plan, or where a fork goes on, the state of that one token is missing in the blocks that others reuse. It can
make their proposals worse, and no answer wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from msgspec.structs import replace

from evener.engine.sampling.pending import PendingStep
from evener.engine.wire.plan import Plan
from evener.engine.worker.assembly import Assembly
from evener.engine.worker.geometry import Geometry
from evener.engine.worker.graphs import StepGraphs
from evener.engine.worker.runner import ForwardStep, Runner
from evener.engine.worker.step_layout import StepArrays, StepShape


class DraftRunner(Runner):
    """Runs the draft model. Its vocabulary may lack the model's last ids: it reads its own last one in their place."""

    def step(self, shape: StepShape, arrays: StepArrays[torch.Tensor]) -> ForwardStep:
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
        self.runner = DraftRunner(a.device, a.draft.model, a.draft.sampler, model.tables, own_geometry(a), a.adapters)
        self._apply, self._step_tokens = model.apply, a.config.step_tokens
        self.graphs: StepGraphs | None = None
        #: For each slot the position of its last proposed token, which the draft model has not computed.
        self._uncomputed: dict[int, int] = {}

    def run(self, plan: Plan) -> tuple[Plan, Callable[[], list[list[int]]]]:
        """Apply a plan and run the draft model. Returns the plan that is left to the model, and what waits for the
        tokens that were proposed for each of ``plan.drafts``."""
        self._apply(plan)
        for admission in plan.admissions:
            self._uncomputed.pop(admission.slot, None)
        plan = replace(plan, adapters=[], admissions=[], updates=[], copies=[])
        lengths = {draft.row: len(draft.ids) for draft in plan.drafts}
        ends = [start + count for start, count in zip(plan.starts, plan.counts, strict=True)]
        steps = [self._follow(plan, lengths)]
        for at in range(1, max(lengths.values(), default=0)):
            rows = [row for row, length in lengths.items() if length > at]
            last = [ends[row] - lengths[row] + at - 1 for row in rows]
            steps.append(self._execute(plan, rows, last, [1] * len(rows), rows))

        def proposed() -> list[list[int]]:
            found: dict[int, list[int]] = {row: [] for row in lengths}
            for rows, step in steps:
                for row, token in zip(rows, step.wait().ids, strict=True):
                    found.setdefault(row, []).append(token)
            return [found[row] for row in lengths]

        return plan, proposed

    def _follow(self, plan: Plan, lengths: Mapping[int, int]) -> tuple[Sequence[int], PendingStep]:
        """Compute the plan's certain tokens, and propose the first one of each row that has some. For a capture, all
        rows that sample do so here too: the model overwrites what it does not check."""
        starts = list(plan.starts)
        counts = [count - lengths.get(row, 0) for row, count in enumerate(plan.counts)]
        left = [row for row, slot in enumerate(plan.slots) if self._uncomputed.pop(slot, -1) == starts[row] - 1 >= 0]
        if sum(counts) + len(left) > self._step_tokens:  # kernels and memory are for no more
            self._execute(plan, left, [starts[row] - 1 for row in left], [1] * len(left), ())
            left = []
        for row in left:
            starts[row], counts[row] = starts[row] - 1, counts[row] + 1
        for row in lengths:
            self._uncomputed[plan.slots[row]] = plan.starts[row] + plan.counts[row] - 1
        rows = sorted(range(len(counts)), key=lambda row: counts[row] > 1)  # as the scheduler orders them
        picked = set(plan.samples) if self.graphs is not None else lengths
        samples = [row for row in rows if row in picked]
        return self._execute(plan, rows, [starts[row] for row in rows], [counts[row] for row in rows], samples)

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
