"""Page-locked copies of the experts of one layer that pass through the device. They are next to each other, so they
cross the link in one copy for each tensor of a stack, whichever experts they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evener.contracts.device import Device
from evener_offload.expert_slots import ExpertSlots, page_locked


class PassingStage:
    """The stage of one stack.

    Args:
        slots: the targets of the copies.
        first: number of the layer's first expert in the stacks of ``slots``.
        count: how many experts the stage holds; at first the layer's first ones.
    """

    def __init__(self, slots: ExpertSlots, first: int, count: int, device: Device) -> None:
        self._slots, self._first = slots, first
        self._tensors = [_locked(device, each) for each in slots.parts(first, count)]
        #: How many tensors an expert has; whether each tensor of the stage holds all of its experts.
        self._each = len(slots.parts(first, 1))
        self._joined = count > 1 and len(self._tensors) == self._each

    def put(self, expert: int, place: int) -> None:
        """Copy ``expert`` (its number in the layer) to a place of the stage. No step may be running."""
        for source, target in zip(self._slots.parts(self._first + expert, 1), self._range(place, 1), strict=True):
            target.copy_(source)

    def copy(self, count: int) -> None:
        """Start copying the experts in the first places to as many slots, on the current stream."""
        for source, target in zip(self._range(0, count), self._slots.parts_of_slots(0, count), strict=True):
            target.copy_(source, non_blocking=True)

    def _range(self, place: int, count: int) -> Sequence[torch.Tensor]:
        if not self._joined:
            return self._tensors[place * self._each : (place + count) * self._each]
        return [each[place] if count == 1 else each[place : place + count] for each in self._tensors]


def _locked(device: Device, tensor: torch.Tensor) -> torch.Tensor:
    locked = page_locked(device, tensor)
    return tensor.clone() if locked is None else locked
