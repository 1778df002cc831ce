"""Drafts in a chain by a layer that reads the model's hidden states, in two parts.

After each step of the model, the layer computes the same tokens: each from the model's hidden states of the token and
the token behind it. So it has state of each token that the model has state of, in the same blocks; behind proposed
tokens that were wrong it is computed again, as the model's own is. The model's hidden states are not kept. So a text
with a token that the layer did not compute in the model's step gets no drafts any more: the answer is ``NEVER``. While
nobody asks for drafts, the layer rests after a while (``rest``), and it rests in steps without a text that could get
some.

Before a step that checks proposed tokens, the layer goes on from the last token of each row. The hidden states of the
tokens that it proposes itself are not known, so its own take their place. The state of these tokens is overwritten
after the step, from the model's. The tokens are a chain: each is the likeliest behind the one before.

The last token of a cached prefix or of a fork's shared tokens was computed with the token that followed it there. Where
another one follows, one token's state is that of the other text. It can make a proposal worse, and no answer wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch

from evener.contracts.device import Readback
from evener.contracts.generation.drafts import NEVER
from evener.engine.inputs.step_layout import LayoutArrays, StepLayout
from evener.engine.sampling.pending import Draw, PendingStep
from evener.engine.wire.plan import DraftedTokens, Plan, StepMasks
from evener.engine.worker.assembly import Assembly
from evener.engine.worker.graphs import StepGraphs
from evener.engine.worker.runner import ForwardStep, Runner
from evener.resolution.buckets import bucket_index
from evener_drafts.computed import ComputedTokens
from evener_drafts.rest import LONG, Rest


class ChainDrafter(ABC):
    """Runs such a layer after each step of the model, and before those that check proposed tokens.

    Args:
        runner: the model's. Steps that the layer follows are not captured.
        alone: makes the steps that the layer takes alone, over the same tables.
        width: of the layer's states.
        groups: indices of the state groups that have the layer's state, or more.

    Attributes:
        runner: as given.
        graphs: none of its own.
    """

    graphs: StepGraphs | None = None

    def __init__(self, a: Assembly, runner: Runner, alone: Runner, width: int, groups: Iterable[int]) -> None:
        self.runner, self._alone = runner, alone
        self._computed, self._rest = ComputedTokens(a, groups, brought=True), Rest(LONG)
        #: By slot, what the layer returned for the last tokens that were sampled behind: that of position p at p modulo
        #: their number. A row samples behind its last certain token and each proposed one.
        slots, self._places = runner.tables.tokens.shape[0], 1 + a.config.config.infer.draft_tokens
        self._kept = a.device.zeros(4 * slots * self._places * width).view(torch.float32).view(slots, -1, width)

    @abstractmethod
    def _follow(self, hidden: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """Run the layer over a step of the model.

        Args:
            hidden: what the model's ``forward`` returned.
            step: the model's, but ``token_ids`` are the tokens behind.

        Returns its states float32 [T, width].
        """

    @abstractmethod
    def _go_on(self, states: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """As ``_follow``, from its own ``states`` [R, width] of the tokens before. They may be overwritten."""

    @abstractmethod
    def _likeliest(self, states: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """Which ids int32 [R] the layer expects next, from copies of its ``states`` [R, width]."""

    def run(self, plan: Plan) -> tuple[Plan, Callable[[], list[list[int]]] | None]:
        """Apply a plan, and propose its tokens. Returns the plan that is left to the model, and what waits for the
        tokens that were proposed for each of ``plan.drafts``; None: it has none."""
        texts = list(zip(plan.slots, plan.starts, plan.counts, strict=True))
        self._computed.apply(plan)
        whole = {row for row, (slot, start, _) in enumerate(texts) if self._computed.length(slot) == start}
        self.runner.after_step = self._after if self._rest.ends(plan) and whole else None
        for slot, start, count in (texts[row] for row in whole if self.runner.after_step is not None):
            self._computed.extend(slot, start + count)
        drafts = [draft for draft in plan.drafts if draft.row in whole]
        with torch.inference_mode():
            if plan.admissions:  # what a slot's last request left must not decide what is proposed
                slots = np.array([admission.slot for admission in plan.admissions], dtype=np.int32)
                self._kept.index_fill_(0, self.runner.device.upload(slots).long(), 0.0)
            if drafts:
                self.runner.apply(plan)
            found = self._propose(plan, drafts) if drafts else []

        def proposed() -> list[list[int]]:
            ids: dict[int, list[int]] = {draft.row: [] for draft in drafts}
            for at, column in enumerate(found):
                longer = [draft.row for draft in drafts if len(draft.ids) > at]
                for row, id in zip(longer, column.wait().tolist(), strict=True):
                    ids[row].append(id)
            return [ids.get(draft.row, [NEVER] * len(draft.ids)) for draft in plan.drafts]

        left = msgspec.structs.replace(plan, adapters=[], admissions=[], updates=[], copies=[]) if drafts else plan
        return left, proposed if plan.drafts else None

    def _propose(self, plan: Plan, drafts: Sequence[DraftedTokens]) -> list[Readback]:
        """For each place in the chain, the ids of the drafts that are so long."""
        device, tokens = self.runner.device, self.runner.tables.tokens
        lengths = [len(draft.ids) for draft in drafts]
        slots = [plan.slots[draft.row] for draft in drafts]
        # Where the first proposed token goes; the layer has computed the token two before it, with the one before. For
        # a request that samples its first token in this step, it has not: its prompt came from the prefix cache, or
        # left one token for this step. Its drafts are a guess.
        first = [plan.starts[d.row] + plan.counts[d.row] - len(d.ids) for d in drafts]
        known = device.upload(np.array([slots, [(place - 2) % self._places for place in first]], dtype=np.int32))
        states = self._kept[known[0], known[1]]
        found: list[Readback] = []
        rows = list(range(len(lengths)))
        for at in range(max(lengths)):
            before, rows = rows, [row for row in rows if lengths[row] > at]
            if rows != before:
                left = np.array([before.index(row) for row in rows], dtype=np.int32)
                states = states.index_select(0, device.upload(left))
            own, places = [slots[row] for row in rows], [first[row] + at for row in rows]
            if at:
                alone = Plan(id=plan.id, slots=own, starts=[place - 2 for place in places], counts=[1] * len(rows))
                layout = StepLayout(alone, self.runner.tables)
                arrays = layout.upload(device)
                states = self._go_on(states, self._with_following(self._alone.step(layout, arrays), arrays))
            where = device.upload(np.array([own, places], dtype=np.int32))
            # A copy, because the op may overwrite it.
            ids = self._likeliest(states.clone(), _bare(states))
            tokens[where[0], where[1]] = ids
            found.append(device.readback(ids))
        return found

    def _with_following(self, step: ForwardStep, arrays: LayoutArrays) -> ForwardStep:
        """The step with the tokens behind its own."""
        following = self.runner.tables.ids(arrays.token_at + 1)
        return replace(step, token_ids=following, embedding_overrides=None)

    def _after(
        self, plan: Plan, done: PendingStep | Draw, hidden: torch.Tensor, step: ForwardStep,
        arrays: LayoutArrays,
    ) -> PendingStep | Draw:  # fmt: skip
        if isinstance(done, PendingStep):
            self._compute(plan, hidden, step, arrays)
            return done

        def draw(masks: StepMasks | None) -> PendingStep:
            pending = done(masks)
            self._compute(plan, hidden, step, arrays)
            return pending

        return draw

    def _compute(self, plan: Plan, hidden: torch.Tensor, step: ForwardStep, arrays: LayoutArrays) -> None:
        """The state of a step's tokens, once the last of each request was sampled."""
        states = self._follow(hidden, self._with_following(step, arrays))
        if plan.samples:
            places = (arrays.sample_positions - 1) % self._places
            self._kept[arrays.sample_slots, places] = states.index_select(0, arrays.last)


def _bare(rows: torch.Tensor) -> ForwardStep:
    """A step for ops that read nothing of it but the bucket."""
    return ForwardStep(bucket_index(rows.shape[0]), rows, rows, ())
