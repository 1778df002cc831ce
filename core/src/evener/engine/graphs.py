"""Captured decode steps: every row adds one token and samples one, padded to a ladder of row counts.

A capture is two segments over fixed addresses, forward and sample. What varies goes into one buffer of int32 arrays;
padding rows use the tables' spare slot, whose blocks are all the null block. Whatever does not fit a capture runs
eagerly, which is always right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from evener.contracts.device import Device
from evener.contracts.graph import GraphCapture, Replay
from evener.engine.plan import Plan
from evener.engine.runner import PendingStep, Runner
from evener.engine.step_layout import StepShape
from evener.errors import EngineError

_ARRAYS = ("positions", "token_slots", "kv_lens")


class Kind(NamedTuple):
    """What is captured apart: a number of rows, and what their sampling has to do."""

    size: int
    random: bool
    penalized: bool = False
    biased: bool = False


@dataclass
class _Captured:
    """One size: its input buffer, its replays and where they leave the ids."""

    buffer: torch.Tensor
    replays: tuple[Replay, ...]
    ids: torch.Tensor
    #: They hold whatever else the replays read and write; a graph knows addresses and keeps nothing alive.
    segments: tuple[Callable[[], None], ...]


class DecodeGraphs:
    """Captures sizes when they are first used, or all of them with ``capture_all``.

    Args:
        capture: how the device captures.
        sizes: row counts that may be captured, ascending; the device's ``max_captures`` counts segments.
        spare_slot: a row of the tables that no request has.
        length: longest sequence; captured attention is built for it.

    Attributes:
        notes: sizes that are not captured, and why; for the manifest.
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
        self.notes: list[str] = []

    def capture_all(self) -> None:
        """Capture every size now, small ones and greedy ones first: ``notes`` is complete and no request waits for it,
        but the first that brings penalties or biases."""
        for random in (False, True):
            for size in self._sizes:
                self._get(Kind(size, random))

    def execute(self, plan: Plan) -> PendingStep | None:
        """Submit a step by replaying a capture. None: nothing was done, the step must run eagerly."""
        rows = len(plan.slots)
        plain = len(plan.samples) == rows and max(plan.counts) == 1
        plain = plain and not (plan.logprobs or plan.copies or plan.scores)
        size = next((s for s in self._sizes if s >= rows), None) if plain else None
        if size is None:
            return None
        captured = self._get(Kind(size, bool(plan.random), bool(plan.penalized), bool(plan.biased)))
        if captured is None:
            return None
        with torch.inference_mode():
            self._runner.apply(plan)
            self._fill(captured, plan, rows, size)
            for replay in captured.replays:
                if self._device.capabilities.graph_update:
                    replay.update()
                replay()
            return PendingStep(plan, self._device.readback(captured.ids[:rows]))

    def _fill(self, captured: _Captured, plan: Plan, rows: int, size: int) -> None:
        host = np.zeros((len(_ARRAYS), size), dtype=np.int32)
        host[0, :rows], host[1, :rows] = plan.starts, plan.slots
        host[1, rows:] = self._spare
        host[2] = host[0] + 1
        captured.buffer.copy_(self._device.upload(host))

    def _get(self, kind: Kind) -> _Captured | None:
        if kind not in self._captured:
            try:
                self._captured[kind] = self._make(kind)
            except EngineError as error:
                self._captured[kind] = None
                words = ("penalized " * kind.penalized, "biased " * kind.biased, "sampled" if kind.random else "greedy")
                self.notes.append(f"{''.join(words)} decode of {kind.size} rows runs eagerly: {error}")
        return self._captured[kind]

    def _make(self, kind: Kind) -> _Captured:
        limit = self._device.capabilities.max_captures
        if limit is not None and self._held + 2 > limit:
            raise EngineError(f"{self._device.name} holds {limit} captures at once and a step takes 2")
        forward, sample, buffer, ids = self._segments(kind)
        # The first run of each builds what must not be built while capturing; it only touches the spare slot.
        replays = []
        with torch.inference_mode():
            for segment in (forward, sample):
                segment()
                replays.append(self._capture.capture(segment))
                self._held += 1
        return _Captured(buffer, tuple(replays), ids, (forward, sample))

    def _segments(self, kind: Kind) -> tuple[Callable[[], None], Callable[[], None], torch.Tensor, torch.Tensor]:
        runner, where, size = self._runner, self._device.torch_device, kind.size
        buffer = torch.zeros(len(_ARRAYS), size, dtype=torch.int32, device=where)
        buffer[1], buffer[2] = self._spare, 1
        positions, slots, lengths = buffer
        every = torch.arange(size + 1, dtype=torch.int32, device=where)
        parts = {"positions": positions, "token_slots": slots, "slots": slots, "kv_lens": lengths, "query_start": every}
        shape = StepShape(size, size, 1, self._length, [1] * size, [self._length] * size)
        ids = torch.zeros(size, dtype=torch.int32, device=where)
        rows = every[:size]

        # Kept from one segment to the next: a copy of the whole vocabulary's rows would cost more than sampling.
        made: dict[str, torch.Tensor] = {}

        def forward() -> None:
            step = runner.step(shape, parts)
            made["logits"] = runner.logits(runner.model.forward(step), step)

        def sample() -> None:
            floats = runner.tables.floats.index_select(0, slots)
            ints = runner.tables.ints.index_select(0, slots)
            penalized, biased, random = (rows if on else None for on in (kind.penalized, kind.biased, kind.random))
            scores = runner.sampler.adjust(
                made["logits"], runner.tables, slots, lengths, self._length, penalized, biased
            )
            ids.copy_(runner.sampler.ids(scores, floats, ints, lengths, random))
            runner.tables.tokens[slots, lengths] = ids

        return forward, sample, buffer, ids
