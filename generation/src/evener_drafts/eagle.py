"""Drafts by a head of EAGLE-3, in two parts.

After each step of the model, the head computes the same tokens: each from the model's hidden states of the token and
the token behind it. So it has state of each token that the model has state of, in the same blocks; behind proposed
tokens that were wrong it is computed again, as the model's own is.

Before a step that checks proposed tokens, the head goes on from the last token of each row. The hidden states of the
tokens that it proposes itself are not known, so its own take their place. The state of these tokens is overwritten
after the step, from the model's. The tokens are a chain: each is the likeliest behind the one before.

The last token of a cached prefix or of a fork's shared tokens was computed with the token that followed it there. Where
another one follows, one token's state is that of the other text. It can make a proposal worse, and no answer wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec
import numpy as np
import torch

from evener.contracts.device import Readback
from evener.engine.sampling.pending import PendingStep
from evener.engine.wire.plan import Plan
from evener.engine.worker.assembly import Assembly
from evener.engine.worker.runner import ForwardStep, Runner
from evener.engine.worker.step_layout import StepLayout
from evener.layers import CausalLM
from evener.resolution.buckets import bucket_index
from evener_drafts.eagle_head import EagleHead
from evener_drafts.model import own_geometry
from evener_drafts.prediction import Prediction


class EagleDrafter(Prediction):
    """Runs the head of ``a.draft``.

    Attributes:
        runner: the model's. Something follows each of its steps, so that none are captured.
    """

    def __init__(self, a: Assembly, runner: Runner) -> None:
        super().__init__(a, runner)
        assert a.draft is not None and isinstance(a.draft.model, EagleHead) and isinstance(a.model, CausalLM)
        assert a.draft.model.layers is not None, "they were chosen with the model"
        self.runner, self._head = runner, a.draft.model
        self._own = Runner(a.device, a.draft.model, a.draft.sampler, runner.tables, own_geometry(a), a.adapters)
        self._taps, self._layers = a.model.stack.taps, a.draft.model.layers
        self._taps |= dict.fromkeys(self._layers)
        embedding = a.model.embedding if self._head.embedding is None else self._head.embedding
        assert embedding is not None, "there are no pipeline stages"
        self._embedding = embedding
        self._ids = a.device.upload(self._head.ids.to(torch.int32).numpy())
        self._nothing = a.device.zeros(4 * self._head.hidden_size).view(torch.float32)[None]
        #: For each slot, what the head returned for the last tokens that were sampled behind [S, hidden], and what to
        #: add to a token's position for its row.
        self._kept: dict[int, tuple[torch.Tensor, int]] = {}

    def run(self, plan: Plan) -> tuple[Plan, Callable[[], list[list[int]]] | None]:
        """Apply a plan, and propose its tokens. Returns the plan that is left to the model, and what waits for the
        tokens that were proposed for each of ``plan.drafts``; None: it has none."""
        for admission in plan.admissions:
            self._kept.pop(admission.slot, None)
        if not plan.drafts:
            return plan, None
        with torch.inference_mode():
            self.runner.apply(plan)
            plan = msgspec.structs.replace(plan, adapters=[], admissions=[], updates=[], copies=[])
            found = self._propose(plan)
        lengths = [len(draft.ids) for draft in plan.drafts]

        def proposed() -> list[list[int]]:
            columns = [ids.wait().tolist() for ids in found]
            longer = [[row for row, length in enumerate(lengths) if length > at] for at in range(len(columns))]
            return [[column[rows.index(row)] for column, rows in zip(columns, longer, strict=True) if row in rows]
                    for row in range(len(lengths))]  # fmt: skip

        return plan, proposed

    def _propose(self, plan: Plan) -> list[Readback]:
        """For each place in the chain, the ids of the drafts that are so long."""
        lengths = [len(draft.ids) for draft in plan.drafts]
        slots = [plan.slots[draft.row] for draft in plan.drafts]
        # Where the first proposed token goes; the head has computed the token two before it, with the one before.
        first = [plan.starts[d.row] + plan.counts[d.row] - len(d.ids) for d in plan.drafts]
        states = torch.stack([self._state(slot, place - 2) for slot, place in zip(slots, first, strict=True)])
        found: list[Readback] = []
        rows = list(range(len(lengths)))
        for at in range(max(lengths)):
            before, rows = rows, [row for row in rows if lengths[row] > at]
            if rows != before:
                states = torch.stack([states[before.index(row)] for row in rows])
            own, places = [slots[row] for row in rows], [first[row] + at for row in rows]
            if at:
                states = self._go_on(plan.id, own, [place - 2 for place in places], states)
            where = self._own.device.upload(np.array([own, places], dtype=np.int32))
            # A copy, because the op may overwrite it.
            ids = self._ids[self._own.sampler.likeliest(self._own.logits(states.clone(), _bare(states)))]
            self.runner.tables.tokens[where[0], where[1]] = ids
            found.append(self._own.device.readback(ids))
        return found

    def _state(self, slot: int, position: int) -> torch.Tensor:
        """What the head returned for a slot's token at ``position``. Zeros for a request that samples its first token
        in this step: its prompt came from the prefix cache, or left one token for this step. Its drafts are a guess."""
        rows, shift = self._kept.get(slot, (self._nothing, -position))
        return rows[position + shift]

    def _go_on(self, plan: int, slots: list[int], positions: list[int], states: torch.Tensor) -> torch.Tensor:
        """Compute one more token of each slot, at ``positions``, from its own ``states`` [R, hidden] of them."""
        layout = StepLayout(Plan(id=plan, slots=slots, starts=positions, counts=[1] * len(slots)))
        parts = layout.upload(self._own.device)
        step = self._own.step(layout, parts)
        return self._extend(states, step, parts)

    def _extend(self, states: torch.Tensor, step: ForwardStep, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        following = self.runner.tables.tokens[parts["token_slots"], parts["positions"] + 1]
        step = replace(step, token_ids=following, embedding_overrides=None)
        return self._head.extend(states, self._embedding(step), step)

    def _predict(
        self, plan: Plan, done: PendingStep, hidden: torch.Tensor, step: ForwardStep, parts: Mapping[str, torch.Tensor]
    ) -> PendingStep:
        streams = [self._taps[layer] for layer in self._layers]
        states = self._extend(self._head.join(streams, step.bucket), step, parts)
        if plan.samples:
            last, index = states.index_select(0, parts["last"]), 0
            for row, count in Counter(plan.samples).items():
                self._kept[plan.slots[row]] = last, index - (plan.starts[row] + plan.counts[row] - count)
                index += count
        return done


def _bare(rows: torch.Tensor) -> ForwardStep:
    """A step for ops that read nothing of it but the bucket."""
    return ForwardStep(bucket_index(rows.shape[0]), rows, rows, ())
