"""Which experts of a layer pass through the device in captured steps: those with the first places. Maps on both sides
say so, and are written where captured steps read them, so only while no step runs."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from evener.contracts.device import Device
from evener_offload.passing_slots import PassingLayer

#: Numbers of experts or slots.
Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]


class PassingPlaces:
    """The places of a layer's experts. At first each has that of its number.

    Attributes:
        expert_at: int32 [experts], by place.
    """

    def __init__(self, device: Device, layer: PassingLayer) -> None:
        self._device, self._layer = device, layer
        self.expert_at = np.arange(layer.experts, dtype=np.int32)
        self._experts: torch.Tensor | None = None
        #: By how many pass: ``slots`` and ``copies`` of ``ExpertMap`` of those on the device, and of the others.
        self._on_device: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._on_host: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def experts(self) -> torch.Tensor:
        """The experts that have slots, by slot: int32 on the device."""
        if self._experts is None:
            self._experts = self._device.upload(self.expert_at[: self._layer.count])
        return self._experts

    def on_device(self, passing: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``slots`` and ``copies`` for the device if so many pass."""
        if passing not in self._on_device:
            slots, copies = (self._device.upload(each.numpy()) for each in self._passing(passing))
            self._on_device[passing] = slots, copies
        return self._on_device[passing]

    def on_host(self, passing: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``slots`` and ``copies`` for the host, which computes the others."""
        if passing not in self._on_host:
            self._on_host[passing] = self._others(passing)
        return self._on_host[passing]

    def exchange(self, one: int, other: int) -> None:
        """Exchange the experts of two places; ``write`` follows."""
        self.expert_at[[one, other]] = self.expert_at[[other, one]]

    def write(self) -> None:
        """Write all maps. No step runs."""
        self.experts.copy_(self._device.upload(self.expert_at[: self._layer.count]))
        for passing, there in self._on_device.items():
            for tensor, new in zip(there, self._passing(passing), strict=True):
                tensor.copy_(self._device.upload(new.numpy()))
        for passing, here in self._on_host.items():
            for tensor, new in zip(here, self._others(passing), strict=True):
                tensor.copy_(new)

    def _passing(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A map of the first experts, each in the slot of its place."""
        return expert_map(self._layer.experts, self.expert_at[:count], np.arange(count, dtype=np.int32))

    def _others(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A map of all but the first experts, each in the slot of its number."""
        others = self.expert_at[count:]
        return expert_map(self._layer.experts, others, others)


def expert_map(count: int, held: Numbers, slots: Numbers) -> tuple[torch.Tensor, torch.Tensor]:
    """``slots`` and ``copies`` of ``ExpertMap`` in host memory for a layer of ``count`` experts, of which those that
    are ``held`` are in these slots."""
    slot_of = np.full((count, 1), -1, dtype=np.int32)
    slot_of[held, 0] = slots
    return torch.from_numpy(slot_of), torch.from_numpy((slot_of[:, 0] >= 0).astype(np.int32))
