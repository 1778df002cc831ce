"""The rows of a prompt's tokens, pooled on the device over all steps that compute the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from evener.contracts.pooling import PoolingSettings
from evener.engine.inputs.step_layout import LayoutArrays
from evener.engine.sampling.pending import PendingStep
from evener.engine.wire.plan import Plan
from evener.engine.worker.runner import ForwardStep, Runner

#: Applies the model's head to rows [R, hidden]; float32 [R, width].
Head = Callable[[torch.Tensor], torch.Tensor]


class Pooler:
    """Pools for up to ``slots`` requests. A request begins where a plan's row starts at position 0, also after a
    preemption.

    Args:
        settings: what is made of a text.
        slots: requests that run at a time.
        runner: of the model; its steps are pooled, and nothing is sampled.
    """

    def __init__(self, settings: PoolingSettings, slots: int, runner: Runner) -> None:
        width, where = runner.model.hidden_size, runner.device.torch_device
        self._runner, runner.instead_of_sampling = runner, self._step
        self._pooling, self._tokens = settings.pooling, settings.tokens
        #: A head for a label follows pooling; a norm comes before.
        self._head_last = settings.task == "score" and self._pooling != "last"
        #: The sum of each request's rows so far, or its first row.
        self._held = torch.zeros(0 if self._pooling == "last" else slots, width, dtype=torch.float32, device=where)

    def _step(self, plan: Plan, hidden: torch.Tensor, step: ForwardStep, arrays: LayoutArrays) -> PendingStep:
        rows = self._pool(plan.counts, hidden, arrays, partial(self._runner.logits, step=step))
        if not plan.samples:
            return PendingStep(plan, None)
        ends = arrays.sample_positions
        pending = self._runner.store_ids(plan, arrays.sample_at, torch.zeros_like(ends), ())
        pending.pooled = [self._runner.device.readback(rows)]
        return pending

    def _pool(self, counts: Sequence[int], hidden: torch.Tensor, arrays: LayoutArrays, head: Head) -> torch.Tensor:
        """Take a step's tokens. Returns the pooled rows of the prompts that end in it, float32 [N, width].

        Args:
            counts: tokens of each of the step's rows, ``Plan.counts``.
            hidden: hidden states of the step's tokens, [T, hidden].
            arrays: those of the step.
        """
        if self._pooling == "last":
            rows = hidden.index_select(0, arrays.last)
            rows = head(rows) if len(rows) else rows
            return rows[:, self._tokens] if self._tokens else rows
        slots, first = arrays.slots, arrays.query_start[:-1]
        each: Head = torch.Tensor.float if self._head_last else head
        begins = arrays.positions.index_select(0, first).eq(0)[:, None]
        held = self._held.index_select(0, slots)
        if self._pooling == "mean":
            # Not index_add: sums have to be the same each time.
            sums = torch.stack([rows.sum(0) for rows in each(hidden).split(counts)])
            held = torch.where(begins, sums, held + sums)
        else:
            held = torch.where(begins, each(hidden.index_select(0, first)), held)
        self._held[slots] = held
        pooled = self._held.index_select(0, arrays.sample_slots)
        pooled = pooled / arrays.sample_positions[:, None] if self._pooling == "mean" else pooled
        return head(pooled) if self._head_last and len(pooled) else pooled
