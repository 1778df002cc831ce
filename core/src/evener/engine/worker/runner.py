"""The runner: one plan in, one step on the device. A step has two segments, forward (ids to hidden states) and sample
(hidden states to logits to ids). Both read and write the tables that stay on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from evener.contracts.adapters import AdapterStacks
from evener.contracts.architecture import Architecture
from evener.contracts.device import Device, Readback
from evener.contracts.state import StateStep, StoredStateProvider
from evener.engine.inputs.device_tables import DeviceTables
from evener.engine.inputs.step_layout import LayoutArrays, StepArrays, StepLayout, StepShape
from evener.engine.sampling.masks import pack_masks
from evener.engine.sampling.pending import Draw, PendingStep
from evener.engine.sampling.results import Results
from evener.engine.sampling.sampler import Sampler
from evener.engine.wire.plan import Plan, StepMasks
from evener.engine.wire.pooling import pooling_part
from evener.engine.worker.geometry import Geometry
from evener.engine.worker.last_rows import LastRows
from evener.engine.worker.stages import PipelineChannel
from evener.resolution.buckets import bucket_index


@dataclass
class ForwardStep:
    """The step as the model sees it; see ``evener.contracts.architecture.Step``."""

    bucket: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    metas: tuple[Any, ...]
    stream: tuple[torch.Tensor, torch.Tensor] | None = None
    embedding_overrides: tuple[torch.Tensor, torch.Tensor] | None = None


class Runner:
    """Runs plans for one model on one device.

    Args:
        tables: the requests' data on the device.
        geometry: state groups and block size. Its slots must be bound before the first step.
        adapters: the places for adapters.
        stages: this rank's end of the pipeline; None without pipeline stages.
        media: the media rows; None on stages after the first, which do not embed.
    """

    def __init__(
        self, device: Device, model: Architecture, sampler: Sampler, tables: DeviceTables, geometry: Geometry,
        adapters: AdapterStacks, stages: PipelineChannel | None = None, media: Any = None,
    ) -> None:  # fmt: skip
        self.device, self.model, self.sampler, self.tables, self.geometry = device, model, sampler, tables, geometry
        self.adapters, self.stages, self.media, self.results = adapters, stages, media, Results(device)
        #: As ``Placement.eager_forward``; None: the model's own ``forward`` computes all rows at once.
        self.eager_forward: Callable[..., torch.Tensor] | None = None
        #: Lets a step compute the last layer for the rows that it samples from only.
        self.last_rows: LastRows | None = None
        #: Told before each replay of a captured step how many of its rows are not padding.
        self.replayed: Callable[[int], None] | None = None
        #: Told of each plan before its step.
        self.before_step: Callable[[Plan], None] | None = None
        #: What follows a step once it has sampled: gets the plan, the step, and what ``forward`` returned.
        self.after_step: Callable[..., PendingStep | Draw] | None = None
        #: What takes the place of sampling, for a model that generates nothing: gets the plan and what ``forward``
        #: returned.
        self.instead_of_sampling: Callable[..., PendingStep] | None = None

    def execute(self, plan: Plan) -> PendingStep | Draw:
        """Submit a step, or the part of it before its masks. On an asynchronous device it returns before that is
        done."""
        with torch.inference_mode():
            others = plan.outputs or plan.scores or plan.drafts or plan.adapted or self.after_step
            hidden, step, arrays = self.forward(plan, sampled_only=not others)
            if self.stages is not None and not self.stages.world.last_stage:
                self.stages.send_stream(hidden, plan, arrays.sample_slots, arrays.sample_positions)
                return PendingStep(plan, None)
            if self.instead_of_sampling is not None:
                return self.instead_of_sampling(plan, hidden, step, arrays)
            outputs = pooling_part("outputs")(self, plan, hidden, step) if plan.outputs else ()
            scores = self._score(plan, hidden, step, arrays) if plan.scores else ()
            done: PendingStep | Draw = PendingStep(plan, None, scores, outputs)
            if plan.samples:
                rows = hidden if len(hidden) < sum(plan.counts) else hidden.index_select(0, arrays.last)
                done = self._sample(plan, arrays, rows, step, scores, outputs)
            return done if self.after_step is None else self.after_step(plan, done, hidden, step, arrays)

    def forward(self, plan: Plan, sampled_only: bool = False) -> tuple[torch.Tensor, ForwardStep, LayoutArrays]:
        """Apply a plan and compute its tokens. Returns the hidden states [T, hidden], or where the model can those
        [S, hidden] that are sampled from, the step, and its arrays."""
        self.apply(plan)
        layout = StepLayout(plan, self.tables)
        arrays = layout.upload(self.device)
        step = self.step(layout, arrays)
        if self.stages is not None and (buffer := self.stages.stream_buffer(layout.tokens)) is not None:
            step.stream = self.stages.layer_input(self.stages.receive_stream(buffer))
        if plan.media is not None and self.media is not None:
            step.embedding_overrides = self.media.take(plan.media)
        if self.eager_forward:
            return self.eager_forward(self, plan, step), step, arrays
        if self.last_rows is None:
            return self.model.forward(step), step, arrays
        with self.last_rows.only(arrays.last if sampled_only and len(plan.samples) < layout.tokens else None):
            return self.model.forward(step), step, arrays

    def step(self, shape: StepShape, arrays: StepArrays) -> ForwardStep:
        """Make the model's step. It only runs device work, so it can be captured."""
        at, positions = arrays.token_at, arrays.positions
        self.adapters.select(self.tables.adapters(at, positions) if shape.adapted else None)
        return ForwardStep(bucket_index(shape.tokens), self.tables.ids(at), positions, self._metas(shape, arrays))

    def logits(self, rows: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """Logits [R, vocab] of selected hidden rows [R, hidden]. The kernels are chosen for R rows."""
        return self.model.logits(rows, replace(step, bucket=bucket_index(rows.shape[0])))

    def greedy(self, rows: torch.Tensor, step: ForwardStep) -> torch.Tensor | None:
        """Ids int32 [R] of the largest logits of selected hidden rows, without gathering the logits of all ranks; None
        if the model cannot do that."""
        return self.model.greedy(rows, replace(step, bucket=bucket_index(rows.shape[0])))

    def apply(self, plan: Plan) -> None:
        """Write what a plan changes: ids that the last stage has sampled, new requests, block tables, copied blocks."""
        if self.stages is not None and self.stages.world.first_stage:
            self.stages.receive_ids(plan)
        if self.before_step is not None:
            self.before_step(plan)
        self.adapters.write(plan.adapters)
        self.tables.write(plan)
        for index, (group, span) in enumerate(zip(self.geometry.groups, self.geometry.spans, strict=True)):
            if pairs := [(copy.source // span, copy.target // span) for copy in plan.copies if copy.group == index]:
                source, target = (self.device.upload(part) for part in np.array(pairs, dtype=np.int32).T.copy())
                provider = cast(StoredStateProvider, group.provider)  # what keeps no tensors has no blocks to copy
                for slot in group.slots:
                    provider.copy_blocks(slot.views, source, target)

    def _metas(self, shape: StepShape, arrays: StepArrays) -> tuple[Any, ...]:
        metas, where = list[Any](), (arrays.block_at, arrays.offsets, arrays.slots)
        paging = arrays.paging or self.tables.paging(*where, shape.max_kv)
        for slot_mapping, table, group in zip(*paging, self.geometry.groups, strict=True):
            if not group.slots:
                metas.append(None)
                continue
            step = StateStep(
                tokens=shape.tokens, requests=shape.requests, max_query=shape.max_query, max_kv=shape.max_kv,
                query_start=arrays.query_start, kv_lens=arrays.kv_lens, positions=arrays.positions,
                slot_mapping=slot_mapping, block_table=table,
                host_query_lens=shape.query_lens, host_kv_lens=shape.kv_lens, captured=shape.captured,
                kept_lens=arrays.kept_lens, host_kept_lens=shape.kept_lens,
            )  # fmt: skip
            metas.append(group.provider.metadata(step, group.spec, group.attention, self.geometry.block_size))
        return tuple(metas)

    def _score(self, plan: Plan, hidden: torch.Tensor, step: ForwardStep, arrays: LayoutArrays) -> list[Readback]:
        """Log-probabilities of prompt tokens. At most ``max_reqs`` rows have logits at the same time, as in sampling:
        the memory plan has no room for more."""
        found: list[tuple[torch.Tensor, ...]] = []
        for rows in arrays.scores.split(max(1, self.tables.tokens.shape[0] - 1)):
            targets = self.tables.ids(arrays.token_at.index_select(0, rows) + 1)
            logits = self.logits(hidden.index_select(0, rows), step)
            found.append((targets, *self.sampler.logprobs(logits, targets, plan.top_scores)))
        return [self.device.readback(torch.cat(columns)) for columns in zip(*found, strict=True)]

    def _sample(
        self, plan: Plan, arrays: LayoutArrays, rows: torch.Tensor, step: ForwardStep,
        scores: Sequence[Readback], outputs: Sequence[Sequence[Readback]],
    ) -> PendingStep | Draw:  # fmt: skip
        slots, positions, how = arrays.sample_slots, arrays.sample_positions, plan.sampling
        greedy = not (how.random or how.penalized or how.biased or how.logprobs or plan.masked)
        best = self.greedy(rows, step) if greedy else None
        if best is not None:
            return self.store_ids(plan, arrays.sample_at, best, scores, outputs)
        logits = self.logits(rows, step)
        floats, ints = (t.index_select(0, slots) if how.random else t for t in (self.tables.floats, self.tables.ints))
        random, penalized, biased = (a if len(a) else None for a in (arrays.random, arrays.penalized, arrays.biased))
        # Log-probabilities are reported for the model's own logits, before biases and penalties.
        raw = logits.index_select(0, arrays.logprobs) if how.logprobs else logits
        longest = max(start + count for start, count in zip(plan.starts, plan.counts, strict=True))
        logits = self.sampler.adjust(logits, self.tables, slots, positions, longest, penalized, biased)

        def draw(masks: StepMasks | None) -> PendingStep:
            shape = logits.shape[0], -(-logits.shape[1] // 32)
            mask = None if masks is None else self.device.upload(pack_masks(plan, masks, np.empty(shape, np.int32)))
            ids = self.sampler.ids(logits, floats, ints, positions, random, mask, filtered=how.filtered)
            # Selected before the readback starts: after that, the memory of ``ids`` may be reused.
            logprob_ids = ids.index_select(0, arrays.logprobs) if how.logprobs else None
            pending = self.store_ids(plan, arrays.sample_at, ids, scores, outputs)
            if logprob_ids is not None:
                found = self.sampler.logprobs(raw, logprob_ids, how.top_logprobs)
                named = [self.sampler.named(raw, logprob_ids, found.chosen, arrays.named)] if how.named else []
                pending.logprobs = list(map(self.device.readback, (*found, *named)))
            return pending

        return draw if plan.masked else draw(None)

    def store_ids(
        self, plan: Plan, at: torch.Tensor, ids: torch.Tensor, scores: Sequence[Readback],
        outputs: Sequence[Sequence[Readback]] = (),
    ) -> PendingStep:  # fmt: skip
        """Write sampled ids [S] at ``StepArrays.sample_at``, send them to the first stage, and start to read them."""
        self.tables.put(at, ids)
        if self.stages is not None:
            self.stages.send_ids(ids)
        return PendingStep(plan, self.results.read(ids), scores, outputs)
