"""Captured decode steps: every row adds one token and samples one, padded to a ladder of row counts.

A capture is two segments over fixed addresses, forward and sample. What varies goes into one buffer of int32 arrays;
padding rows use the tables' spare slot, whose blocks are all the null block. A pipeline stage's stream arrives at a
fixed address before the replay, and a copy of it goes on afterwards; only the last stage samples. Whatever does not fit
a capture runs eagerly, which is always right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from evener.contracts.device import Device
from evener.contracts.graph import GraphCapture, Replay
from evener.engine.plan import Plan
from evener.engine.runner import PendingStep, Runner
from evener.engine.step_layout import StepShape, aligned
from evener.errors import EngineError

log = logging.getLogger("evener.worker")
_ARRAYS = ("positions", "token_slots", "kv_lens")


class Kind(NamedTuple):
    """What is captured apart: a number of rows, and what their sampling has to do."""

    size: int
    random: bool
    penalized: bool = False
    biased: bool = False

    @property
    def greedy(self) -> bool:
        """Whether each row wants the id of its largest logit and nothing else."""
        return not (self.random or self.penalized or self.biased)


@dataclass
class _Captured:
    """One size: its input buffer, its replays and where they leave what they ``made``, "ids" and "stream"."""

    buffer: torch.Tensor
    room: torch.Tensor | None
    replays: tuple[Replay, ...]
    made: dict[str, torch.Tensor]
    #: They hold whatever else the replays read and write; a graph knows addresses and keeps nothing alive.
    segments: tuple[Callable[[], None], ...]


class DecodeGraphs:
    """Captures sizes when they are first used.

    Args:
        capture: how the device captures.
        sizes: row counts that may be captured, ascending; the device's ``max_captures`` counts segments.
        spare_slot: a row of the tables that no request has.
        length: longest sequence; captured attention is built for it.
    """

    def __init__(
        self,
        runner: Runner,
        device: Device,
        capture: GraphCapture,
        sizes: tuple[int, ...],
        spare_slot: int,
        length: int,
    ) -> None:
        self._runner, self._device, self._capture = runner, device, capture
        self._sizes, self._spare, self._length = sizes, spare_slot, length
        self._captured: dict[Kind, _Captured | None] = {}
        self._held = 0

    def execute(self, plan: Plan) -> PendingStep | None:
        """Submit a step by replaying a capture. None: nothing was done, the step must run eagerly."""
        rows = len(plan.slots)
        plain = len(plan.samples) == rows and max(plan.counts) == 1
        plain = plain and not (plan.logprobs or plan.copies or plan.scores or plan.media)
        size = next((s for s in self._sizes if s >= rows), None) if plain else None
        if size is None:
            return None
        stages = self._runner.stages
        samples = stages is None or stages.world.last_stage
        kind = Kind(size, bool(plan.random), bool(plan.penalized), bool(plan.biased)) if samples else Kind(size, False)
        captured = self._get(kind)
        if captured is None:
            return None
        with torch.inference_mode():
            self._runner.apply(plan)
            lengths = self._fill(captured, plan, rows, size)
            if stages is not None and captured.room is not None:
                stages.take(captured.room[:rows])
            for replay in captured.replays:
                if self._device.capabilities.graph_update:
                    replay.update([1] * size, lengths)
                replay()
            if stages is not None and not samples:
                slots, positions = captured.buffer[1:, :rows].clone()
                stream, parts = captured.made["stream"][:rows], {"sample_slots": slots, "sample_positions": positions}
                stages.pass_on(stream.clone(), plan, parts)
                return PendingStep(plan, None)
            ids = captured.made["ids"][:rows]
            if stages is not None:
                stages.give_ids(ids.clone())
            return PendingStep(plan, self._device.readback(ids))

    def _fill(self, captured: _Captured, plan: Plan, rows: int, size: int) -> list[int]:
        """Bring the inputs up to a plan; returns the rows' lengths."""
        host = np.zeros((len(_ARRAYS), captured.buffer.shape[1]), dtype=np.int32)
        host[0, :rows], host[1, :rows] = plan.starts, plan.slots
        host[1, rows:] = self._spare
        host[2] = host[0] + 1
        captured.buffer.copy_(self._device.upload(host))
        lengths: list[int] = host[2, :size].tolist()
        return lengths

    def _get(self, kind: Kind) -> _Captured | None:
        if kind not in self._captured:
            try:
                self._captured[kind] = self._make(kind)
            except EngineError as error:
                self._captured[kind] = None
                words = ("penalized " * kind.penalized, "biased " * kind.biased, "sampled" if kind.random else "greedy")
                log.warning("%s decode of %d rows runs eagerly: %s", "".join(words), kind.size, error)
        return self._captured[kind]

    def _make(self, kind: Kind) -> _Captured:
        limit = self._device.capabilities.max_captures
        if limit is not None and self._held + 2 > limit:
            raise EngineError(f"{self._device.name} holds {limit} captures at once and a step takes 2")
        captured, replays = self._segments(kind), []
        # The first run of each builds what must not be built while capturing; it only touches the spare slot.
        with torch.inference_mode():
            for segment in captured.segments:
                segment()
                replays.append(self._capture.capture(segment))
                self._held += 1
        return replace(captured, replays=tuple(replays))

    def _segments(self, kind: Kind) -> _Captured:
        runner, where, size = self._runner, self._device.torch_device, kind.size
        stages = runner.stages
        room = None if stages is None else stages.room(size)
        width = aligned(size, self._device.capabilities.alignment)
        buffer = torch.zeros(len(_ARRAYS), width, dtype=torch.int32, device=where)
        buffer[1], buffer[2] = self._spare, 1
        positions, slots, lengths = buffer[:, :size]
        every = torch.arange(size + 1, dtype=torch.int32, device=where)
        parts = {"positions": positions, "token_slots": slots, "slots": slots, "kv_lens": lengths, "query_start": every}
        shape = StepShape(size, size, 1, self._length, [1] * size, [1] * size)
        ids = torch.zeros(size, dtype=torch.int32, device=where)
        rows = every[:size]

        # Kept from one segment to the next: a copy of the whole vocabulary's rows would cost more than sampling.
        made = {"ids": ids}

        def forward() -> None:
            step = runner.step(shape, parts)
            if stages is not None and room is not None:
                step.stream = stages.entry(room.clone())  # a layer may write where it reads
            hidden = runner.model.forward(step)
            if stages is not None and not stages.world.last_stage:
                made["stream"] = hidden
            elif kind.greedy and (best := runner.greedy(hidden, step)) is not None:
                made["best"] = best
            else:
                made["logits"] = runner.logits(hidden, step)

        def sample() -> None:
            if "best" in made:
                ids.copy_(made["best"])
                runner.tables.tokens[slots, lengths] = ids
                return
            floats = runner.tables.floats.index_select(0, slots)
            ints = runner.tables.ints.index_select(0, slots)
            penalized, biased, random = (rows if on else None for on in (kind.penalized, kind.biased, kind.random))
            scores = runner.sampler.adjust(
                made["logits"], runner.tables, slots, lengths, self._length, penalized, biased
            )
            ids.copy_(runner.sampler.ids(scores, floats, ints, lengths, random))
            runner.tables.tokens[slots, lengths] = ids

        segments = (forward, sample) if stages is None or stages.world.last_stage else (forward,)
        return _Captured(buffer, room, (), made, segments)
