"""In how many captured steps each expert was chosen, so that the most chosen experts get a slot or pass. The device
counts. From time to time the host reads the counts; older counts weigh less (least frequently used, with ageing)."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from evener.contracts.device import Device, Readback

#: The host reads the counts every so many steps, and multiplies its older scores by the second number.
_REVIEW, _AGEING = 8, 0.875
#: One count is clearly larger than another if it is at least so many times as large, and if the difference is at least
#: so many standard deviations of two random counts (Poisson).
_MORE_OFTEN, _DEVIATIONS = 1.5, 2.5
#: Part of the time that exchanges may take; most experts to exchange at once while it is unknown how long one takes.
_PART, _FIRST = 0.05, 4


class ChoiceCounts:
    """Counts steps, not tokens: in a step an expert is read once for all tokens.

    Args:
        layers: number of layers.
        experts: the most experts of a layer.

    Attributes:
        scores: float32 [layers, experts], the counts with ageing.
    """

    def __init__(self, device: Device, layers: int, experts: int) -> None:
        self._device, self._last = device, layers - 1
        #: Counts on the device, and as the host last read them. Both wrap around after 2^32.
        self._counts: torch.Tensor | None = None
        self._seen = np.zeros((layers, experts), dtype=np.int32)
        #: How often the running step has chosen each expert so far; and int32 tensors of ones, by their length.
        self._marks: torch.Tensor | None = None
        self._ones: dict[int, torch.Tensor] = {}
        self.scores = np.zeros(self._seen.shape, dtype=np.float32)
        self._reading: Readback | None = None
        self._steps, self._looked, self._exchange_s = 0, time.perf_counter(), 0.0

    def prepare(self) -> None:
        """Make the counts on the device. Not in a capture: each step runs once before it is captured."""
        if self._counts is None:
            self._counts, self._marks = self._device.upload(self._seen), self._device.upload(self._seen)

    def note(self, layer: int, ids: torch.Tensor) -> None:
        """Submit that the step chose these experts of a layer, int32 [T, k]: one launch, and three more in the last
        layer. Padding rows count too: they are few, and choose the same experts each time."""
        assert self._counts is not None and self._marks is not None, "prepared"
        chosen = ids.flatten()
        if len(chosen) not in self._ones:
            self._ones[len(chosen)] = self._device.upload(np.ones(len(chosen), dtype=np.int32))
        self._marks[layer].index_add_(0, chosen, self._ones[len(chosen)])
        if layer == self._last:
            self._counts.add_(self._marks.clamp_(max=1))
            self._marks.zero_()

    def replayed(self) -> bool:
        """To be called before a replay is submitted. Returns whether ``scores`` are new."""
        self._steps += 1
        if self._reading is not None:
            if not self._reading.ready():
                return False
            self.add(self._reading.wait().numpy())
            self._reading = None
            return True
        if self._counts is not None and self._steps % _REVIEW == 0:
            self._reading = self._device.readback(self._counts)
        return False

    def add(self, counts: np.ndarray[Any, Any]) -> None:
        """Add the device's ``counts``, int32 [layers, experts], to the scores."""
        self.scores = self.scores * _AGEING + (counts - self._seen)
        self._seen = counts.copy()

    def most(self) -> int:
        """How many experts may be exchanged now."""
        now, most = time.perf_counter(), _FIRST
        if self._exchange_s:
            most = int(_PART * (now - self._looked) / self._exchange_s)
        self._looked = now
        return most

    def exchanged(self, count: int, seconds: float) -> None:
        """Note how many seconds ``count`` exchanges took."""
        self._exchange_s = seconds / count


def clearly(more: float, less: float) -> bool:
    """Whether ``more`` is so much larger than ``less`` that chance does not explain it. So few experts are exchanged
    where tokens choose evenly."""
    return more >= _MORE_OFTEN * less and more - less >= _DEVIATIONS * (more + less) ** 0.5 > 0
