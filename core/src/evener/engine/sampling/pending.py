"""Steps that were submitted, and those that wait for their masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from evener.contracts.device import Readback
from evener.engine.sampling.sampler import Sampler
from evener.engine.wire.messages import TokenLogprobs
from evener.engine.wire.plan import Plan, StepMasks, StepResult


class PendingStep:
    """A submitted step, whose results are being copied to the host.

    Attributes:
        logprobs: for ``SamplePlan.logprobs``: the three tensors of ``LogprobTensors``. If ids are named, a fourth: the
            values of ``SamplePlan.named`` float32 [n, k], of which a row uses as many as it names.
        scores: for ``plan.scores``: the scored ids, then the three tensors of ``LogprobTensors``.
        outputs: for each of ``plan.outputs``: its rows float32, in parts.
        pooled: of a model that embeds, for ``plan.samples``: pooled rows float32 [N, width].
        drafts: the ids that a draft model proposed for each of ``plan.drafts``, once its own steps are done; None: the
            plan has those that were proposed.
        counters, transfers: return those of ``StepResult``; called once the step is done. ``counters`` raises what
            failed on the host.
        every_rank: whether all ranks send their results, not only the one that reports steps.
    """

    logprobs: Sequence[Readback] = ()
    pooled: Sequence[Readback] = ()
    drafts: Callable[[], list[list[int]]] | None = None
    counters: Callable[[], Mapping[str, int]] = dict
    transfers: Callable[[], list[int]] = list
    every_rank = False

    def __init__(
        self, plan: Plan, ids: Readback | None, scores: Sequence[Readback] = (),
        outputs: Sequence[Sequence[Readback]] = (),
    ) -> None:  # fmt: skip
        self._plan, self._ids, self.scores, self.outputs = plan, ids, scores, outputs

    def ready(self) -> bool:
        """Whether ``wait`` would return at once."""
        others = (*self.logprobs, *self.scores, *self.pooled, *chain(*self.outputs))
        return (self._ids is None or self._ids.ready()) and all(each.ready() for each in others)

    def wait(self) -> StepResult:
        """Wait until the step is done and return its result."""
        # The ids of a captured step end with padding.
        ids: list[int] = [] if self._ids is None else self._ids.wait().tolist()[: len(self._plan.samples)]
        sampling, logprobs, scores = self._plan.sampling, [], []
        if self.logprobs:
            logprobs = _rows([ids[i] for i in sampling.logprobs], self.logprobs[:3])
            values = self.logprobs[3].wait().tolist() if sampling.named else []
            for row, named in enumerate(sampling.named):
                if named:
                    first = logprobs[row].likeliest(0)
                    logprobs[row] = TokenLogprobs(first.ids + named, first.values + values[row][: len(named)])
        if self.scores:
            scores = _rows(self.scores[0].wait().tolist(), self.scores[1:])
        pooled = [row.numpy().tobytes() for rows in self.pooled for row in rows.wait()]
        outputs = [b"".join(part.wait().numpy().tobytes() for part in parts) for parts in self.outputs]
        return StepResult(plan=self._plan.id, ids=ids, logprobs=logprobs, scores=scores, pooled=pooled, outputs=outputs,
                          drafts=self.drafts() if self.drafts else [], counters=dict(self.counters()),
                          transfers=self.transfers())  # fmt: skip


#: Samples the tokens of a step, given its masks or, if it has none, None.
Draw = Callable[[StepMasks | None], PendingStep]


def _rows(picked: list[int], tensors: Sequence[Readback]) -> list[TokenLogprobs]:
    chosen, values, ids = (r.wait() for r in tensors)
    return [TokenLogprobs(*row) for row in Sampler.unpack(chosen, values, ids, picked)]
