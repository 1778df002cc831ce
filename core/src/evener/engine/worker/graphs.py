"""Captured steps: the launches of a step are captured once as a device graph and replayed with one call.

Two kinds of steps are captured: those whose requests all compute one token and sample the next, and those of one
request with a short prompt or with drafts, which would take longer to launch than to compute. Their sizes are padded to
one of a few. All other steps run eagerly, which is always correct, and so do all steps of a runner with ``after``. A
state provider that computes long state in another way has captures for both (``StateProvider.capture_limits``): the
plan's longest request decides, so that all ranks choose alike.

A capture works on fixed addresses. If masks come between forward and sample, it has two segments, otherwise one. What
changes from step to step is copied into one buffer of arrays first (``captured_inputs``). With pipeline stages, the
stream is received at a fixed address before the replay, and a copy of the result is sent after it; only the last stage
samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from evener.contracts.device import Device
from evener.contracts.graph import GraphCapture, Replay
from evener.engine.inputs.captured_inputs import DecodeInputs, Inputs, Lengths, PromptInputs, Staging
from evener.engine.sampling.masks import pack_masks
from evener.engine.sampling.pending import Draw, PendingStep
from evener.engine.wire.plan import Plan, StepMasks
from evener.engine.worker.runner import Runner
from evener.errors import EngineError

log = logging.getLogger("evener.worker")
#: The most kinds of steps of one request that are captured: a client can ask for each length with each kind of
#: sampling, and the memory plan has room for few.
MAX_PROMPT_CAPTURES = 32


class CaptureKey(NamedTuple):
    """Steps that share a capture.

    Attributes:
        size: the padded number of tokens.
        samples: the padded number of samples of a step of one request; 0: a decode step, in which each request has one
            token.
        length: the most tokens that a request may have after the step.
        adapted: whether a row has an adapter.
        random, penalized, biased, masked: the parts of sampling that at least one row needs.
    """

    size: int
    samples: int
    length: int
    adapted: bool = False
    random: bool = False
    penalized: bool = False
    biased: bool = False
    masked: bool = False


@dataclass
class _Outputs:
    """What the replays of a capture write, each time at the same address; R rows are sampled, padding included.

    Attributes:
        stream: float32 [T, hidden], before the last stage.
        logits: float32 [R, V], between the two segments; None where ids follow from hidden states without them.
        ids: int32 [R].
    """

    stream: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    ids: torch.Tensor | None = None


@dataclass
class _CapturedStep:
    """One capture: its inputs, its replays, and what they write. They read masks, int32 [R, ceil(V / 32)], which
    ``masks`` fills."""

    inputs: Inputs
    stream_buffer: torch.Tensor | None
    replays: tuple[Replay, ...]
    outputs: _Outputs
    #: The captured functions. They keep all other tensors of the replays alive; a graph only stores addresses.
    segments: tuple[Callable[[], None], ...]
    masks: Staging | None = None


class StepGraphs:
    """Captures each kind of step when it first occurs, and replays it from then on.

    Args:
        capture: how the device captures.
        lengths: by number of requests whose decode steps may be captured, ascending: the most tokens that a request may
            have in each of their captures, ascending.
        prompt_sizes: numbers of tokens of a prompt whose step may be captured, ascending.
        spare_slot: a row of the tables that belongs to no request.
        length: the longest sequence.
    """

    def __init__(
        self, runner: Runner, device: Device, capture: GraphCapture, lengths: Mapping[int, Sequence[int]],
        prompt_sizes: tuple[int, ...], spare_slot: int, length: int,
    ) -> None:  # fmt: skip
        self._runner, self._device, self._capture = runner, device, capture
        self._lengths, self._prompt_sizes, self._spare, self._length = lengths, prompt_sizes, spare_slot, length
        self._captured: dict[CaptureKey, _CapturedStep | None] = {}
        self._capture_count = 0

    def execute(self, plan: Plan) -> PendingStep | Draw | None:
        """As ``Runner.execute``, by replaying a capture. None, with nothing done, if the step must run eagerly."""
        stages = self._runner.stages
        samples = stages is None or stages.world.last_stage
        key = None if self._runner.after_step is not None else self._key(plan, samples)
        captured = None if key is None else self._capture_for(key)
        if captured is None:
            return None
        tokens, rows = sum(plan.counts), len(plan.samples)
        with torch.inference_mode():
            self._runner.apply(plan)
            lengths = captured.inputs.fill(plan)
            if stages is not None and captured.stream_buffer is not None:
                stages.receive_stream(captured.stream_buffer[:tokens])
            if self._runner.replayed is not None:
                self._runner.replayed(tokens)
            forward, *sample = captured.replays
            arrays = captured.inputs.arrays
            # Copied before the replay, which leaves the positions of the next step.
            where = () if samples else [each[:rows].clone() for each in (arrays.sample_slots, arrays.sample_positions)]
            self._replay(forward, lengths)
            if stages is not None and not samples:
                stream = captured.outputs.stream
                assert stream is not None, "a replay before the last stage writes it"
                stages.send_stream(stream[:tokens].clone(), plan, *where)
                return PendingStep(plan, None)

            def draw(masks: StepMasks | None) -> PendingStep:
                if masks is not None and captured.masks is not None:
                    pack_masks(plan, masks, captured.masks.next())
                    captured.masks.send()
                for replay in sample:
                    self._replay(replay, lengths)
                ids = captured.outputs.ids
                assert ids is not None, "the replay has written them"
                if stages is not None:
                    stages.send_ids(ids[:rows].clone())
                return PendingStep(plan, self._runner.results.read(ids.clone()))

            return draw if plan.masked else draw(None)

    def _key(self, plan: Plan, draws: bool) -> CaptureKey | None:
        """The capture that serves a plan; None if it must run eagerly."""
        rows, longest, samples, how = len(plan.slots), max(plan.counts), len(plan.samples), plan.sampling
        if how.logprobs or plan.copies or plan.scores or plan.outputs or plan.media or not samples:
            return None
        if longest == 1 and samples == rows:
            sizes, room = tuple(self._lengths), 0
        elif rows == 1 and self._prompt_sizes:
            # A step also samples after each draft: room is made for as many samples as the shortest capture has tokens.
            sizes, room = self._prompt_sizes, self._prompt_sizes[0] if plan.drafts else 1
        else:
            return None
        size = next((s for s in sizes if s >= max(rows, longest)), None)
        if size is None or samples > max(room, rows):
            return None
        needs = (how.random, how.penalized, how.biased, plan.masked) if draws else ()
        length = self._length if room else next(n for n in self._lengths[size] if n > max(plan.starts))
        return CaptureKey(size, room, length, plan.adapted, *map(bool, needs))

    def _replay(self, replay: Replay, lengths: Lengths) -> None:
        if self._device.capabilities.graph_update:
            replay.update(*lengths)
        replay()

    def _capture_for(self, kind: CaptureKey) -> _CapturedStep | None:
        if kind not in self._captured:
            try:
                self._captured[kind] = self._capture_step(kind)
            except EngineError as error:
                self._captured[kind] = None
                needs = [name for name, on in zip(kind._fields[3:], kind[3:], strict=True) if on] or ["greedy"]
                what = f"prompt of {kind.size} tokens" if kind.samples else f"decode of {kind.size} rows"
                log.warning("%s %s cannot be captured and runs eagerly, which is slower: %s",
                            " ".join(needs), what, error)  # fmt: skip
        return self._captured[kind]

    def _capture_step(self, kind: CaptureKey) -> _CapturedStep:
        limit, more = self._device.capabilities.max_captures, 1 + kind.masked
        if limit is not None and self._capture_count + more > limit:
            raise EngineError(f"{self._device.name} holds {limit} captures at once, and such a step takes {more}")
        if kind.samples and sum(key.samples > 0 for key in self._captured) >= MAX_PROMPT_CAPTURES:
            raise EngineError(f"{MAX_PROMPT_CAPTURES} kinds of such steps are captured already")
        captured, replays = self._build_segments(kind), []
        # Each segment runs once before its capture, because kernels must not be built during one. All rows are padding.
        with torch.inference_mode():
            for segment in captured.segments:
                segment()
                replays.append(self._capture.capture(segment))
                self._capture_count += 1
        return replace(captured, replays=tuple(replays))

    def _build_segments(self, kind: CaptureKey) -> _CapturedStep:
        runner, stages = self._runner, self._runner.stages
        sizes = (self._device, runner.tables, kind.size, self._spare, kind.length)
        inputs: Inputs = PromptInputs(*sizes, kind.samples) if kind.samples else DecodeInputs(*sizes)
        stream_buffer = None if stages is None else stages.stream_buffer(kind.size)
        arrays = inputs.arrays
        slots, positions = arrays.sample_slots, arrays.sample_positions
        adjusted = kind.random or kind.penalized or kind.biased or kind.masked
        rows = torch.arange(len(slots), dtype=torch.int32, device=slots.device)

        # The second segment reads the logits where the first left them: copying them would cost more than sampling.
        outputs, packed, masks = _Outputs(), None, None
        if kind.masked:
            words = -(-runner.model.vocab_size // 32)
            packed = torch.full((len(slots), words), -1, dtype=torch.int32, device=slots.device)
            masks = Staging(self._device, packed, 4, -1)

        def forward() -> None:
            step = runner.step(replace(inputs.shape, adapted=kind.adapted), arrays)
            if stages is not None and stream_buffer is not None:
                step.stream = stages.layer_input(stream_buffer.clone())  # a layer may write where it reads
            hidden = runner.model.forward(step)
            if stages is not None and not stages.world.last_stage:
                outputs.stream = hidden
                inputs.advance()
                return
            hidden = hidden if arrays.last is None else hidden.index_select(0, arrays.last)
            # Where no row needs a part of sampling, each takes the id of its largest logit.
            outputs.ids = None if adjusted else runner.greedy(hidden, step)
            outputs.logits = runner.logits(hidden, step) if outputs.ids is None else None

        def sample() -> None:
            tables, logits, ids = runner.tables, outputs.logits, outputs.ids
            if logits is not None and adjusted:
                floats, ints = (t.index_select(0, slots) for t in (tables.floats, tables.ints))
                penalized, biased, random = (rows if on else None for on in (kind.penalized, kind.biased, kind.random))
                logits = runner.sampler.adjust(logits, tables, slots, positions, kind.length, penalized, biased)
                ids = runner.sampler.ids(logits, floats, ints, positions, random, packed)
            elif logits is not None:
                ids = runner.sampler.likeliest(logits)
            assert ids is not None, "the first segment leaves ids or logits"
            tables.put(arrays.sample_at, ids)
            outputs.ids = ids
            inputs.advance()

        def both() -> None:
            forward()
            sample()

        segments: tuple[Callable[[], None], ...] = (forward, sample) if kind.masked else (both,)
        if stages is not None and not stages.world.last_stage:
            segments = (forward,)
        return _CapturedStep(inputs, stream_buffer, (), outputs, segments, masks)
