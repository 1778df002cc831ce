"""Timing callables that do the same: on the device's clock, over inputs that no cache holds, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evener.contracts.device import Device
from evener.contracts.graph import GraphCapture
from evener.contracts.ops import OpFunction
from evener.testing.tuning.record import Recorded

#: Seconds that one timed run should take at least, so that its start and end do not count; how often all candidates are
#: run, and then those that are not so much slower than the fastest.
SPAN, FIRST, ROUNDS, HOPELESS = 1e-3, 3, 6, 2.0


class Copies:
    """Inputs of several calls, with memory of their own for what may be overwritten.

    Attributes:
        inputs: for a callable.
    """

    def __init__(self, recorded: Recorded) -> None:
        donated = [t.donated for t in recorded.schema.inputs]
        self._kept, self.inputs = recorded.inputs, [_writable(values, donated) for values in recorded.inputs]

    def restore(self) -> None:
        """Undo what was overwritten."""
        for kept, used in zip(self._kept, self.inputs, strict=True):
            for old, new in zip(kept, used, strict=True):
                if new is not old:
                    new.copy_(old)


def _writable(values: Sequence[Any], donated: Sequence[bool]) -> tuple[Any, ...]:
    pairs = zip(values, donated, strict=False)
    return tuple(v.clone() if on and isinstance(v, torch.Tensor) else v for v, on in pairs)


@dataclass
class Clock:
    """How a device is timed; ``capture`` replays calls where it can, so that the host's share does not count."""

    device: Device
    capture: GraphCapture | None

    def times(self, runs: Sequence[Callable[[], None]], copies: Copies) -> list[float]:
        """Seconds of one call of each of ``runs``, which ``prepared`` made: medians of rounds in which they take
        turns."""
        found = [[self._measured(run, copies, 1) for _ in range(FIRST)] for run in runs]
        best = [min(seconds) for seconds in found]
        for _ in range(ROUNDS):
            for run, once, seconds in zip(runs, best, found, strict=True):
                if once <= HOPELESS * min(best):
                    seconds.append(self._measured(run, copies, max(1, min(50, int(SPAN / once)))))
        if self.capture is not None:
            self.capture.release()
        return [statistics.median(seconds[FIRST:] or seconds) / len(copies.inputs) for seconds in found]

    def prepared(self, function: OpFunction, copies: Copies) -> Callable[[], None]:
        """What calls ``function`` once with each of the inputs.

        Raises:
            EngineError: it cannot be captured.
        """

        def segment() -> None:
            for inputs in copies.inputs:
                function(*inputs)

        segment()
        return segment if self.capture is None else self.capture.capture(segment)

    def _measured(self, run: Callable[[], None], copies: Copies, times: int) -> float:
        copies.restore()

        def work() -> None:
            for _ in range(times):
                run()

        return self.device.measure(work) / times
