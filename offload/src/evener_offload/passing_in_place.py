"""Experts that the device reads where they are, in page-locked host memory (``offload.pass_in_place``), as weights of
vLLM's offload: none is copied to slots. So only those that some token chooses cross the link, but not before it has
chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from evener.contracts.declared import CallSite, StackedWeight
from evener.contracts.device import Device
from evener.contracts.quant import PackedWeight, Packing
from evener.layers.builder import Builder
from evener_offload.expert_slots import map_tensors, page_locked
from evener_offload.passing_slots import PassingLayer
from evener_offload.prompt_share import MapsHost
from evener_offload.second_layout import Stacks, expert_bytes


class StackInPlace:
    """A stack of experts in host memory, as the device's kernels see it.

    Args:
        own: makes it after the stack's weights are loaded; it takes no memory of the device.
        stack: in the device's layout.

    Attributes:
        weight: its declaration.
    """

    def __init__(self, own: Builder, stack: StackedWeight, device: Device) -> None:
        self.weight = replace(stack, name=f"{stack.name} in place", placement=None)
        self._stack, self._device = stack, device
        self._table = own.table(("experts in place", stack.name), 0, self._make)

    @property
    def value(self) -> PackedWeight:
        """Its tensors are tensors of the device."""
        return cast("PackedWeight", self._table.value)

    def _make(self, where: torch.device) -> Any:
        whole = self._stack.value
        assert whole is not None, "experts on the host are loaded first"
        self._stack.value = replace(whole, data=map_tensors(whole.data, self._locked))
        return replace(whole, data=map_tensors(self._stack.value.data, self._mapped), nbytes=0)

    def _locked(self, tensor: torch.Tensor) -> torch.Tensor:
        locked = None if tensor.is_pinned() else page_locked(self._device, tensor)
        return tensor if locked is None else locked

    def _mapped(self, tensor: torch.Tensor) -> torch.Tensor:
        mapped = cast("MapsHost", self._device).mapped
        return mapped(tensor) if tensor.is_contiguous() else mapped(tensor.mT).mT


class PassingInPlace:
    """The layers of which experts pass.

    Args:
        sites, found, own, packings, residents: as of ``PassingSlots``.

    Attributes:
        layer: by path.
    """

    def __init__(
        self, sites: Sequence[CallSite], found: Mapping[str, Stacks], own: Builder, packings: Mapping[str, Packing],
        device: Device, residents: int,
    ) -> None:  # fmt: skip
        self.layer: dict[str, PassingLayer] = {}
        for number, site in enumerate(sites):
            gate_up, down = (StackInPlace(own, stack, device) for stack in found[site.path])
            experts, absent = site.static["experts"], site.static["experts"] - residents
            nbytes = expert_bytes(found[site.path], packings)
            self.layer[site.path] = PassingLayer(number, (gate_up, down), experts, absent, absent, nbytes)

    def __str__(self) -> str:
        return "where they are"
