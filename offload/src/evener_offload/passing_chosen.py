"""Experts that pass through the device once tokens have chosen them (``offload.pass_chosen``): these alone cross the
link.

In each layer the device takes a part of the chosen experts that have no slot of their own, and copies them by its
kernels from page-locked memory to slots, which all layers use in turn. In the ids that the host gets, these experts are
replaced by the number of an expert that nobody has. So the host and the link have their parts of what is chosen, not of
what there is, and both end together whatever tokens choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from evener.contracts.device import Device
from evener_offload.passing_slots import PassingLayer
from evener_offload.prompt_share import MapsHost

#: What a part is counted in.
PARTS = 256


class Chosen(NamedTuple):
    """The chosen experts of one layer's step.

    Attributes:
        ids: int32 [T, k] for the host: the number of experts stands for those that the device computes.
        slots, copies: int32 [experts, 1] and [experts] as of ``ExpertMap``, for the device.
        experts: int32 [slots], the expert in each slot, or 0.
        used: int32 [1], how many slots are used: the first ones.
    """

    ids: torch.Tensor
    slots: torch.Tensor
    copies: torch.Tensor
    experts: torch.Tensor
    used: torch.Tensor


@runtime_checkable
class CopiesChosen(MapsHost, Protocol):
    """A device that does both in one launch each. Captures may hold them."""

    def split_chosen(
        self, ids: torch.Tensor, held: torch.Tensor | None, experts: int, most: int, part: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As ``split_chosen``."""

    def copy_chosen(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], experts: torch.Tensor,
        used: torch.Tensor,
    ) -> None:  # fmt: skip
        """Copy row ``experts[i]`` of each source to row i of its target, for each i less than ``used``: on the current
        stream. Sources are int32 [experts, words] in page-locked memory as ``mapped`` gives it, targets int32
        [slots, words]."""


class PassingChosen:
    """Submits the copies of chosen experts.

    Args:
        stream: of the copies; None: the device has one queue.
    """

    def __init__(self, device: Device, stream: Any) -> None:
        self._device, self._stream = device, stream
        #: By number of a layer: its experts as the device reads them, and the slots.
        self._rows: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]] | None] = {}

    def split(self, layer: PassingLayer, ids: torch.Tensor, held: torch.Tensor | None, part: float) -> Chosen:
        """Take a part of the chosen experts of a layer.

        Args:
            ids: int32 [T, k].
            held: int32 [experts, 1]: not negative for those with slots of their own, which are left out; None: none.
            part: of those that are left.
        """
        device = self._device
        split = device.split_chosen if isinstance(device, CopiesChosen) else split_chosen
        return Chosen(*split(ids, held, layer.experts, layer.count, round(part * PARTS)))

    def copies(self, layer: PassingLayer) -> bool:
        """Whether the layer's experts can be copied so: their tensors have each expert in one piece."""
        return self._rows_of(layer) is not None

    def copy(self, layer: PassingLayer, chosen: Chosen) -> Callable[[], None]:
        """Start copying; returns what makes the current stream wait for the end."""
        rows, device, copied = self._rows_of(layer), self._device, None
        assert rows is not None, "see copies"
        if self._stream is not None:
            begun, copied = device.new_event(), device.new_event()
            begun.record()
            begun.wait(self._stream)
        with self._stream or nullcontext():
            if isinstance(device, CopiesChosen):
                device.copy_chosen(*rows, chosen.experts, chosen.used)
            else:
                for source, target in zip(*rows, strict=True):
                    target.copy_(source.index_select(0, chosen.experts))
            if copied is not None:
                copied.record()

        def wait() -> None:
            if copied is not None:
                copied.wait()

        return wait

    def _rows_of(self, layer: PassingLayer) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        if layer.number not in self._rows:
            found = [each.rows(layer.first // layer.experts) for each in layer.slots]
            self._rows[layer.number] = None
            if all(each is not None for each in found):
                pairs = [pair for each in found for pair in each or ()]
                device: Any = self._device
                self._rows[layer.number] = [device.mapped(s) for s, _ in pairs], [t for _, t in pairs]
        return self._rows[layer.number]


def split_chosen(
    ids: torch.Tensor, held: torch.Tensor | None, experts: int, most: int, part: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fields of ``Chosen``, for any device: of the chosen experts without a slot of their own the first ones, as
    many as ``part`` of 256 of them, rounded, but at most ``most``."""
    numbers = torch.arange(experts, dtype=torch.int32, device=ids.device)
    chosen = torch.zeros_like(numbers).index_add_(0, ids.flatten(), torch.ones_like(ids.flatten())) > 0
    if held is not None:
        chosen &= held[:, 0] < 0
    rank = chosen.cumsum(0, dtype=torch.int32)
    used = (rank[-1:] * part + PARTS // 2).div(PARTS, rounding_mode="floor").clamp(max=most).to(torch.int32)
    there = chosen & (rank <= used)
    slots = torch.where(there, rank - 1, -1)
    of_slot = torch.zeros(most + 1, dtype=torch.int32, device=ids.device)
    of_slot.scatter_(0, torch.where(there, slots, most).long(), numbers)
    others = torch.where(there, experts, numbers).index_select(0, ids.flatten()).view(ids.shape)
    return others, slots[:, None], there.to(torch.int32), of_slot[:most], used
