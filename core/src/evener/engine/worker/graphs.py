"""Captured decode steps: the launches of a step are captured once as a device graph and replayed with one call.

Only steps are captured whose rows all compute one token and sample the next. The number of rows is padded to one of a
few sizes; padding rows use the tables' spare slot, whose blocks are all the null block. All other steps run eagerly,
which is always correct.

A capture has two segments, forward and sample, and works on fixed addresses. What changes from step to step is copied
into one buffer of int32 arrays first. With pipeline stages, the stream is received at a fixed address before the
replay, and a copy of the result is sent after it; only the last stage samples.
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
from evener.engine.sampling.masks import packed_masks
from evener.engine.sampling.pending import Draw, PendingStep
from evener.engine.wire.plan import Plan, StepMasks
from evener.engine.worker.runner import Runner
from evener.engine.worker.step_layout import StepShape, aligned
from evener.errors import EngineError

log = logging.getLogger("evener.worker")
_ARRAYS = ("positions", "token_slots", "kv_lens")


class CaptureKey(NamedTuple):
    """Steps that share a capture: the padded number of rows, and which parts of sampling at least one row needs."""

    size: int
    random: bool = False
    penalized: bool = False
    biased: bool = False
    masked: bool = False

    @property
    def greedy(self) -> bool:
        """Whether every row takes the id of its largest logit."""
        return not any(self[1:])


@dataclass
class _CapturedStep:
    """One capture: its input ``buffer`` int32 [3, size or more], its replays, and their tensors: they write "ids", and
    "stream" before the last stage; they read "masks" int32 [size, ceil(V / 32)]."""

    buffer: torch.Tensor
    stream_buffer: torch.Tensor | None
    replays: tuple[Replay, ...]
    outputs: dict[str, torch.Tensor]
    #: The captured functions. They keep all other tensors of the replays alive; a graph only stores addresses.
    segments: tuple[Callable[[], None], ...]


class DecodeGraphs:
    """Captures each kind of step when it first occurs, and replays it from then on.

    Args:
        capture: how the device captures.
        sizes: row counts that may be captured, ascending.
        spare_slot: a row of the tables that belongs to no request.
        length: the longest sequence; captured attention is built for it.
    """

    def __init__(
        self, runner: Runner, device: Device, capture: GraphCapture, sizes: tuple[int, ...], spare_slot: int,
        length: int,
    ) -> None:  # fmt: skip
        self._runner, self._device, self._capture = runner, device, capture
        self._sizes, self._spare, self._length = sizes, spare_slot, length
        self._captured: dict[CaptureKey, _CapturedStep | None] = {}
        self._capture_count = 0

    def execute(self, plan: Plan) -> PendingStep | Draw | None:
        """As ``Runner.execute``, by replaying a capture. None, with nothing done, if the step must run eagerly."""
        rows = len(plan.slots)
        plain = len(plan.samples) == rows and max(plan.counts) == 1
        plain = plain and not (plan.logprobs or plan.copies or plan.scores or plan.media)
        size = next((s for s in self._sizes if s >= rows), None) if plain else None
        if size is None:
            return None
        stages = self._runner.stages
        samples = stages is None or stages.world.last_stage
        needs = (plan.random, plan.penalized, plan.biased, plan.masked) if samples else ()
        captured = self._get(CaptureKey(size, *map(bool, needs)))
        if captured is None:
            return None
        with torch.inference_mode():
            self._runner.apply(plan)
            lengths = self._fill(captured, plan, rows, size)
            if stages is not None and captured.stream_buffer is not None:
                stages.receive_stream(captured.stream_buffer[:rows])
            forward, *sample = captured.replays
            self._replay(forward, lengths)
            if stages is not None and not samples:
                slots, positions = captured.buffer[1:, :rows].clone()
                parts = {"sample_slots": slots, "sample_positions": positions}
                stages.send_stream(captured.outputs["stream"][:rows].clone(), plan, parts)
                return PendingStep(plan, None)

            def draw(masks: StepMasks | None) -> PendingStep:
                if masks is not None:
                    buffer = captured.outputs["masks"]
                    buffer[:rows].copy_(self._device.upload(packed_masks(plan, masks, 32 * buffer.shape[1])))
                self._replay(sample[0], lengths)
                ids = captured.outputs["ids"][:rows]
                if stages is not None:
                    stages.send_ids(ids.clone())
                return PendingStep(plan, self._device.readback(ids))

            return draw if plan.masked else draw(None)

    def _replay(self, replay: Replay, lengths: list[int]) -> None:
        if self._device.capabilities.graph_update:
            replay.update([1] * len(lengths), lengths)
        replay()

    def _fill(self, captured: _CapturedStep, plan: Plan, rows: int, size: int) -> list[int]:
        """Copy a plan's inputs into the capture's buffer. Returns the rows' sequence lengths, padding included."""
        host = np.zeros((len(_ARRAYS), captured.buffer.shape[1]), dtype=np.int32)
        host[0, :rows], host[1, :rows] = plan.starts, plan.slots
        host[1, rows:] = self._spare
        host[2] = host[0] + 1
        captured.buffer.copy_(self._device.upload(host))
        lengths: list[int] = host[2, :size].tolist()
        return lengths

    def _get(self, kind: CaptureKey) -> _CapturedStep | None:
        if kind not in self._captured:
            try:
                self._captured[kind] = self._make(kind)
            except EngineError as error:
                self._captured[kind] = None
                needs = [name for name, on in kind._asdict().items() if on is True] or ["greedy"]
                log.warning("%s decode of %d rows cannot be captured and runs eagerly, which is slower: %s",
                            " ".join(needs), kind.size, error)  # fmt: skip
        return self._captured[kind]

    def _make(self, kind: CaptureKey) -> _CapturedStep:
        limit = self._device.capabilities.max_captures
        if limit is not None and self._capture_count + 2 > limit:
            raise EngineError(f"{self._device.name} holds {limit} captures at once, and a step takes 2")
        captured, replays = self._segments(kind), []
        # Each segment runs once before its capture, because kernels must not be built during one. All rows are padding.
        with torch.inference_mode():
            for segment in captured.segments:
                segment()
                replays.append(self._capture.capture(segment))
                self._capture_count += 1
        return replace(captured, replays=tuple(replays))

    def _segments(self, kind: CaptureKey) -> _CapturedStep:
        runner, where, size = self._runner, self._device.torch_device, kind.size
        stages = runner.stages
        stream_buffer = None if stages is None else stages.stream_buffer(size)
        width = aligned(size, self._device.capabilities.alignment)
        buffer = torch.zeros(len(_ARRAYS), width, dtype=torch.int32, device=where)
        buffer[1], buffer[2] = self._spare, 1
        positions, slots, lengths = buffer[:, :size]
        every = torch.arange(size + 1, dtype=torch.int32, device=where)
        parts = {"positions": positions, "token_slots": slots, "slots": slots, "kv_lens": lengths, "query_start": every}
        shape = StepShape(size, size, 1, self._length, [1] * size, [1] * size)
        ids = torch.zeros(size, dtype=torch.int32, device=where)
        rows = every[:size]

        # The second segment reads the logits where the first left them: copying them would cost more than sampling.
        outputs = {"ids": ids}
        if kind.masked:
            words = -(-runner.model.vocab_size // 32)
            outputs["masks"] = torch.full((size, words), -1, dtype=torch.int32, device=where)

        def forward() -> None:
            step = runner.step(shape, parts)
            if stages is not None and stream_buffer is not None:
                step.stream = stages.layer_input(stream_buffer.clone())  # a layer may write where it reads
            hidden = runner.model.forward(step)
            if stages is not None and not stages.world.last_stage:
                outputs["stream"] = hidden
            elif kind.greedy and (best := runner.greedy(hidden, step)) is not None:
                outputs["best"] = best
            else:
                outputs["logits"] = runner.logits(hidden, step)

        def sample() -> None:
            if "best" in outputs:
                ids.copy_(outputs["best"])
                runner.tables.tokens[slots, lengths] = ids
                return
            floats = runner.tables.floats.index_select(0, slots)
            ints = runner.tables.ints.index_select(0, slots)
            penalized, biased, random = (rows if on else None for on in (kind.penalized, kind.biased, kind.random))
            tables, logits = runner.tables, outputs["logits"]
            logits = runner.sampler.adjust(logits, tables, slots, lengths, self._length, penalized, biased)
            ids.copy_(runner.sampler.ids(logits, floats, ints, lengths, random, outputs.get("masks")))
            runner.tables.tokens[slots, lengths] = ids

        segments = (forward, sample) if stages is None or stages.world.last_stage else (forward,)
        return _CapturedStep(buffer, stream_buffer, (), outputs, segments)
