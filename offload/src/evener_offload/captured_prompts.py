"""Prompts that are captured, except for experts in host memory.

A step of one prompt has few tokens for each expert. So the device ends a layer before the host has submitted the next
one: in Qwen3-30B-A3B, attention and router of a layer alone are about 16 launches. Such a step is captured in pieces:
a layer's routed experts are left out, and each replay submits them between two pieces, as eager steps do. PyTorch's
compiler and vLLM call such captures piecewise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from evener.config.resolve import ResolvedConfig
from evener.contracts.device import Device
from evener.contracts.graph import Replay
from evener.engine.inputs.captured_inputs import PromptInputs
from evener.engine.wire.plan import Plan
from evener.engine.worker.runner import Runner
from evener.errors import EngineError
from evener.resolution.buckets import LEAST_CAPTURED_PROMPT, capture_sizes

log = logging.getLogger("evener.worker")
#: Tokens of the largest prompt that is captured. With more tokens, the device takes longer than the host's launches.
MOST_TOKENS = 1024

#: ``start(x, ids, weights, experts)`` submits experts, and returns a function that waits for the sums [T, hidden].
Start = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], Callable[[], torch.Tensor]]


class PieceCapture(Protocol):
    """Captures a segment in pieces; the other methods are those of ``GraphCapture``."""

    def capture(self, segment: Callable[[], None]) -> Replay: ...
    def release(self) -> None: ...
    def leave_out(self, work: Callable[[], None]) -> None:
        """Do not capture ``work``, and do not run it now. Each replay calls it, between the piece that ends here and
        the piece that begins here. Only while ``capture`` runs the segment."""


@runtime_checkable
class CapturesPieces(Protocol):
    """A device that captures segments in pieces."""

    def piece_capture(self) -> PieceCapture:
        """A new object for captures, which share memory of their own."""


@dataclass
class _CapturedPrompt:
    """The capture of one size.

    Attributes:
        segment: keeps alive what the replay reads.
        hidden: what the replay writes: float32 [tokens, hidden].
    """

    inputs: PromptInputs
    segment: Callable[[], None]
    hidden: torch.Tensor
    replay: Replay


class CapturedPrompts:
    """Captures a prompt of each size when it first occurs, and replays it from then on.

    Args:
        capture: the device's.
        sizes: numbers of tokens that are captured, ascending.
        spare: a row of the tables that belongs to no request.
        length: tokens of the longest sequence.

    Attributes:
        steps: replays so far.
        recording: whether the segment that runs is captured, now or on its next run.
    """

    def __init__(self, device: Device, capture: PieceCapture, sizes: Sequence[int], spare: int, length: int) -> None:
        self._device, self._capture, self._sizes, self._spare, self._length = device, capture, sizes, spare, length
        self._captured: dict[int, _CapturedPrompt | None] = {}
        self.steps, self.recording = 0, False
        #: Whether the segment is being captured (before that it is run once); the tokens of the step that is replayed.
        self._capturing, self._tokens = False, 0

    def __str__(self) -> str:
        return f"single prompts of up to {self._sizes[-1]} tokens are captured but for experts, where state allows it"

    def run(self, runner: Runner, plan: Plan) -> torch.Tensor | None:
        """Hidden states [T, hidden] of a step, as ``Architecture.forward`` returns them. None if the step must run
        eagerly; then nothing was done."""
        tokens = sum(plan.counts)
        size = next((each for each in self._sizes if each >= tokens), None)
        # Steps of the warm-up have ids below 0: the memory for state is not set then.
        if size is None or plan.id < 0 or len(plan.slots) > 1 or plan.adapted or plan.drafts or plan.media is not None:
            return None
        if size not in self._captured:
            self._captured[size] = self._make(runner, size)
        if (captured := self._captured[size]) is None:
            return None
        # Hidden states do not depend on what is sampled; a chunk samples nothing.
        lengths = captured.inputs.fill(
            Plan(id=plan.id, slots=plan.slots, starts=plan.starts, counts=plan.counts, samples=[0])
        )
        self.steps, self._tokens = self.steps + 1, tokens
        if self._device.capabilities.graph_update:
            captured.replay.update(*lengths)
        captured.replay()
        return captured.hidden[:tokens]

    def start(
        self, start: Start, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: Any
    ) -> Callable[[], torch.Tensor]:
        """Let each replay ``start`` a layer's experts here and wait for them. Returns a function that returns the sums
        [T, hidden], which are 0 in padding rows. Only while ``recording``."""
        found = torch.zeros_like(x)

        def work() -> None:
            rows = slice(self._tokens)
            found[rows].copy_(start(x[rows], ids[rows], weights[rows], experts)())

        if self._capturing:
            self._capture.leave_out(work)
        return lambda: found

    def close(self) -> None:
        """Free the captures. Calling ``close`` again does nothing."""
        self._captured.clear()
        self._capture.release()

    def _make(self, runner: Runner, size: int) -> _CapturedPrompt | None:
        if not runner.geometry.captures_prompts():
            return None
        inputs, found = PromptInputs(self._device, runner.tables, size, self._spare, self._length), list[torch.Tensor]()

        def segment() -> None:
            found[:] = [runner.model.forward(runner.step(inputs.shape, inputs.arrays))]

        self.recording = True
        try:
            segment()  # builds kernels, which a capture must not do
            self._capturing = True
            replay = self._capture.capture(segment)
        except EngineError as error:
            log.warning("a prompt of %d tokens with experts on the host cannot be captured and runs eagerly, which is "
                        "slower: %s", size, error)  # fmt: skip
            return None
        finally:
            self.recording = self._capturing = False
        return _CapturedPrompt(inputs, segment, found[0], replay)


def captured_prompts(config: ResolvedConfig, device: Device) -> CapturedPrompts | None:
    """The captures of a device; None if steps are not captured, or the device does not capture in pieces."""
    most = min(MOST_TOKENS, config.max_seq_len, config.step_tokens)
    sizes = [size for size in capture_sizes(most) if size >= LEAST_CAPTURED_PROMPT]
    if not (config.use_cuda_graph and sizes and isinstance(device, CapturesPieces)):
        return None
    return CapturedPrompts(device, device.piece_capture(), sizes, config.max_reqs, config.max_seq_len)
