"""Which experts of a layer pass through the device in captured steps: those in the first places. Device and host have
maps of them. Captured steps read the maps at fixed addresses, so maps are written only while no step runs."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from evener.contracts.device import Device
from evener_offload.passing_slots import PassingLayer

#: Numbers of experts or slots.
Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]


class PassingPlaces:
    """The places of a layer's experts. At first each expert is in the place with its number.

    Attributes:
        expert_at: int32 [experts]: the expert in each place.
    """

    def __init__(self, device: Device, layer: PassingLayer) -> None:
        self._device, self._layer = device, layer
        self.expert_at = np.arange(layer.experts, dtype=np.int32)
        self._experts: torch.Tensor | None = None
        #: By how many experts pass: ``slots`` and ``copies`` of ``ExpertMap``, for the device and for the host.
        self._on_device: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._on_host: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def experts(self) -> torch.Tensor:
        """The expert in each slot: int32 [slots] on the device."""
        if self._experts is None:
            self._experts = self._device.upload(self.expert_at[: self._layer.count])
        return self._experts

    def on_device(self, passing: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``slots`` and ``copies`` for the device, if so many experts pass."""
        if passing not in self._on_device:
            slots, copies = (self._device.upload(each.numpy()) for each in self._passing(passing))
            self._on_device[passing] = slots, copies
        return self._on_device[passing]

    def on_host(self, passing: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``slots`` and ``copies`` for the host, which computes the experts that do not pass."""
        if passing not in self._on_host:
            self._on_host[passing] = self._others(passing)
        return self._on_host[passing]

    def exchange(self, one: int, other: int) -> None:
        """Exchange the experts in two places. ``write`` must follow."""
        self.expert_at[[one, other]] = self.expert_at[[other, one]]

    def write(self) -> None:
        """Write all maps. No step may be running."""
        self.experts.copy_(self._device.upload(self.expert_at[: self._layer.count]))
        for passing, there in self._on_device.items():
            for tensor, new in zip(there, self._passing(passing), strict=True):
                tensor.copy_(self._device.upload(new.numpy()))
        for passing, here in self._on_host.items():
            for tensor, new in zip(here, self._others(passing), strict=True):
                tensor.copy_(new)

    def _passing(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A map of the experts in the first ``count`` places, each in the slot with the number of its place."""
        return expert_map(self._layer.experts, self.expert_at[:count], np.arange(count, dtype=np.int32))

    def _others(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A map of all other experts, each in the slot with its own number."""
        others = self.expert_at[count:]
        return expert_map(self._layer.experts, others, others)


def expert_map(count: int, held: Numbers, slots: Numbers) -> tuple[torch.Tensor, torch.Tensor]:
    """``slots``, int32 [count, 1], and ``copies``, int32 [count], of an ``ExpertMap`` in host memory, for a layer of
    ``count`` experts: the experts ``held`` are in these ``slots``, the others in none."""
    slot_of = np.full((count, 1), -1, dtype=np.int32)
    slot_of[held, 0] = slots
    return torch.from_numpy(slot_of), torch.from_numpy((slot_of[:, 0] >= 0).astype(np.int32))
