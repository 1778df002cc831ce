"""The runner: one plan in, one step on the device. Two segments over device-resident tables: forward (ids to logits)
and sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from evener.contracts.architecture import Architecture
from evener.contracts.device import Device, Readback
from evener.contracts.state import StateStep
from evener.engine.device_tables import DeviceTables
from evener.engine.geometry import Geometry
from evener.engine.messages import TokenLogprobs
from evener.engine.plan import Plan, StepResult
from evener.engine.sampler import Sampler
from evener.engine.stages import Stages
from evener.engine.step_layout import StepLayout, StepShape
from evener.media.store import MediaStore
from evener.resolution.buckets import bucket_index


@dataclass
class ForwardStep:
    """What a model sees of a step; see ``evener.contracts.architecture.Step``."""

    bucket: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    metas: tuple[Any, ...]
    stream: tuple[torch.Tensor, torch.Tensor] | None = None
    overlay: tuple[torch.Tensor, torch.Tensor] | None = None


class PendingStep:
    """A submitted step; what it gives is on its way to the host.

    Attributes:
        logprobs: of ``plan.logprobs``: chosen, values and ids as in ``LogprobTensors``.
        scores: of ``plan.scores``: the ids that were scored, then chosen, values and ids as in ``LogprobTensors``.
    """

    logprobs: Sequence[Readback] = ()
    scores: Sequence[Readback] = ()

    def __init__(self, plan: Plan, ids: Readback | None) -> None:
        self._plan, self._ids = plan, ids

    def ready(self) -> bool:
        """True once ``wait`` would not block."""
        return (self._ids is None or self._ids.ready()) and all(r.ready() for r in (*self.logprobs, *self.scores))

    def wait(self) -> StepResult:
        """Block until the step is done."""
        ids: list[int] = [] if self._ids is None else self._ids.wait().tolist()
        logprobs, scores = [], []
        if self.logprobs:
            logprobs = _rows([ids[i] for i in self._plan.logprobs], self.logprobs)
        if self.scores:
            scores = _rows(self.scores[0].wait().tolist(), self.scores[1:])
        return StepResult(plan=self._plan.id, ids=ids, logprobs=logprobs, scores=scores)


def _rows(picked: list[int], tensors: Sequence[Readback]) -> list[TokenLogprobs]:
    chosen, values, ids = (r.wait() for r in tensors)
    return [TokenLogprobs(*row) for row in Sampler.unpack(chosen, values, ids, picked)]


class Runner:
    """Runs plans for one model on one device.

    Args:
        tables: device-resident rows of requests.
        geometry: state groups and block size; its slots are bound.
        stages: this rank's ends of the pipe, where there are pipeline stages.
        media: what stands for tokens; None behind the first stage, which embeds.
    """

    def __init__(
        self, device: Device, model: Architecture, sampler: Sampler, tables: DeviceTables, geometry: Geometry,
        stages: Stages | None = None, media: MediaStore | None = None,
    ) -> None:  # fmt: skip
        self.device, self.model, self.sampler, self.tables, self.geometry = device, model, sampler, tables, geometry
        self.stages, self.media = stages, media

    def execute(self, plan: Plan) -> PendingStep:
        """Submit a step; returns before the device has finished it, where the device allows."""
        with torch.inference_mode():
            hidden, step, parts = self.forward(plan)
            if self.stages is not None and not self.stages.world.last_stage:
                self.stages.pass_on(hidden, plan, parts)
                return PendingStep(plan, None)
            scores = self._score(plan, hidden, step, parts) if plan.scores else ()
            pending = PendingStep(plan, None)
            if plan.samples:
                pending = self._sample(plan, parts, hidden.index_select(0, parts["last"]), step)
            pending.scores = scores
            return pending

    def forward(self, plan: Plan) -> tuple[torch.Tensor, ForwardStep, dict[str, torch.Tensor]]:
        """Apply a plan and compute its tokens: hidden states [T, hidden], the step, and the arrays of its layout."""
        self.apply(plan)
        layout = StepLayout(plan)
        parts = layout.upload(self.device)
        step = self.step(layout, parts)
        if self.stages is not None and (room := self.stages.room(layout.tokens)) is not None:
            step.stream = self.stages.entry(self.stages.take(room))
        if plan.media is not None and self.media is not None:
            step.overlay = self.media.take(plan.media)
        return self.model.forward(step), step, parts

    def step(self, shape: StepShape, parts: Mapping[str, torch.Tensor]) -> ForwardStep:
        """What the model sees, from the arrays of a layout. Device work only, so that it can be part of a capture."""
        positions = parts["positions"]
        token_ids = self.tables.tokens[parts["token_slots"], positions]
        return ForwardStep(bucket_index(shape.tokens), token_ids, positions, self._metas(shape, parts))

    def logits(self, rows: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """Logits [R, vocab] of picked hidden rows [R, hidden], in the bucket of their own number."""
        return self.model.logits(rows, replace(step, bucket=bucket_index(rows.shape[0])))

    def greedy(self, rows: torch.Tensor, step: ForwardStep) -> torch.Tensor | None:
        """Ids int32 [R] of the largest logits of picked hidden rows, where ranks share the vocabulary; else None."""
        return self.model.greedy(rows, replace(step, bucket=bucket_index(rows.shape[0])))

    def apply(self, plan: Plan) -> None:
        """Bring the device's tables up to a plan: ids that come from the last stage, admissions, new blocks, copies."""
        if self.stages is not None and self.stages.world.first_stage:
            self.stages.take_ids(plan)
        if plan.admissions:
            self.tables.admit(plan.admissions)
        if plan.updates:
            self.tables.update(plan.updates)
        for index, group in enumerate(self.geometry.groups):
            span = self.geometry.spans[index]
            pairs = [(source // span, target // span) for g, source, target in plan.copies if g == index]
            if pairs:
                source, target = (self.device.upload(part) for part in np.array(pairs, dtype=np.int32).T.copy())
                for slot in group.slots:
                    group.provider.copy_blocks(slot.views, source, target)

    def _metas(self, shape: StepShape, parts: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        size = self.geometry.block_size
        positions = parts["positions"]
        column = torch.div(positions, size, rounding_mode="floor")
        offset = positions - column * size
        columns = -(-shape.max_kv // size)
        metas = []
        for table, group in zip(self.tables.blocks, self.geometry.groups, strict=True):
            step = StateStep(
                tokens=shape.tokens,
                requests=shape.requests,
                max_query=shape.max_query,
                max_kv=shape.max_kv,
                query_start=parts["query_start"],
                kv_lens=parts["kv_lens"],
                positions=positions,
                slot_mapping=table[parts["token_slots"], column] * size + offset,
                block_table=table[:, :columns].index_select(0, parts["slots"]),
                host_query_lens=shape.query_lens,
                host_kv_lens=shape.kv_lens,
            )
            metas.append(group.provider.metadata(step, group.spec, group.attention, size) if group.slots else None)
        return tuple(metas)

    def _score(
        self, plan: Plan, hidden: torch.Tensor, step: ForwardStep, parts: dict[str, torch.Tensor]
    ) -> list[Readback]:
        """Log-probabilities of prompt tokens, a few rows at a time: never more logits than a step's samples have."""
        found: list[tuple[torch.Tensor, ...]] = []
        for rows in parts["scores"].split(max(1, self.tables.tokens.shape[0] - 1)):
            slots, positions = (parts[name].index_select(0, rows) for name in ("token_slots", "positions"))
            targets = self.tables.tokens[slots, positions + 1]
            logits = self.logits(hidden.index_select(0, rows), step)
            found.append((targets, *self.sampler.logprobs(logits, targets, plan.top_scores)))
        return [self.device.readback(torch.cat(columns)) for columns in zip(*found, strict=True)]

    def _sample(
        self, plan: Plan, parts: dict[str, torch.Tensor], rows: torch.Tensor, step: ForwardStep
    ) -> PendingStep:  # fmt: skip
        slots, positions = parts["sample_slots"], parts["sample_positions"]
        greedy = not (plan.random or plan.penalized or plan.biased or plan.logprobs)
        best = self.greedy(rows, step) if greedy else None
        if best is not None:
            return self._sampled(plan, slots, positions, best)
        logits = self.logits(rows, step)
        floats, ints = self.tables.floats.index_select(0, slots), self.tables.ints.index_select(0, slots)
        random, penalized, biased = (parts[n] if getattr(plan, n) else None for n in ("random", "penalized", "biased"))
        # Log-probabilities are those of the model, whatever is done to its logits afterwards.
        raw = logits.index_select(0, parts["logprobs"]) if plan.logprobs else logits
        longest = max(start + count for start, count in zip(plan.starts, plan.counts, strict=True))
        logits = self.sampler.adjust(logits, self.tables, slots, positions, longest, penalized, biased)
        ids = self.sampler.ids(logits, floats, ints, positions, random, filtered=plan.filtered)
        # Ids may be overwritten once they are being read back.
        told = ids.index_select(0, parts["logprobs"]) if plan.logprobs else None
        pending = self._sampled(plan, slots, positions, ids)
        if told is not None:
            pending.logprobs = [self.device.readback(t) for t in self.sampler.logprobs(raw, told, plan.top_logprobs)]
        return pending

    def _sampled(self, plan: Plan, slots: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> PendingStep:
        self.tables.tokens[slots, positions] = ids
        if self.stages is not None:
            self.stages.give_ids(ids)
        return PendingStep(plan, self.device.readback(ids))
