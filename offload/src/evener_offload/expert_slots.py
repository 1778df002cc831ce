"""A stack of experts in host memory, and slots for some of them on the device, both in a layout of the device's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch

from evener.contracts.declared import StackedWeight
from evener.contracts.device import Device
from evener.contracts.quant import PackedWeight, Packing
from evener.errors import ConfigError
from evener.layers.builder import Builder


class ExpertSlots:
    """The slots of one stack.

    Args:
        own: gets the slots as a table, so that they are part of the memory plan.
        stack: all experts; its weights are loaded to the host before tables of the device are made.
        packing: the stack's.
        count: slots.

    Attributes:
        weight: the declaration of the slots, as kernels see it: a stack of ``count`` matrices.
        nbytes: of one expert.
    """

    def __init__(self, own: Builder, stack: StackedWeight, packing: Packing, count: int, device: Device) -> None:
        self._stack, self._device = stack, device
        self.weight = replace(stack, name=f"{stack.name} on the device", experts=count, placement=None)
        self.nbytes = packing.nbytes(stack.parts, stack.dtype)
        self._table = own.table(("slots of experts", stack.name), count * self.nbytes, self._make)

    @property
    def value(self) -> PackedWeight:
        """The slots."""
        return cast("PackedWeight", self._table.value)

    def copy(self, expert: int, slot: int) -> None:
        """Start copying an expert to a slot, on the current stream."""
        assert self._stack.value is not None, "weights are loaded"
        pairs = zip(_tensors(self._stack.value.data[expert]), _tensors(self.value.data[slot]), strict=True)
        for source, target in pairs:
            target.copy_(source, non_blocking=True)

    def _make(self, where: torch.device) -> Any:
        """Empty slots. The experts move to page-locked memory, if the device has any: copies from it are
        asynchronous."""
        whole, count = self._stack.value, self.weight.experts
        assert whole is not None, "experts on the host are loaded first"
        data = whole.data
        if isinstance(data, torch.Tensor):
            self._stack.value = whole = replace(whole, data=self._pinned(data))
            made: Any = torch.empty((count, *data.shape[1:]), dtype=data.dtype, device=where)
        elif isinstance(data, tuple):
            self._stack.value = whole = replace(whole, data=tuple(map(self._pinned, data)))
            made = tuple(_empty_like(data[0], where) for _ in range(count))
        else:
            raise ConfigError(f"infer.resident_experts does not copy {self._stack.name}, which is packed as "
                              f"{whole.layout}; use infer.cpu_layer_num alone, so that the host computes")  # fmt: skip
        return replace(whole, data=made, shape=(count, *whole.shape[1:]), nbytes=count * self.nbytes)

    def _pinned(self, data: Any) -> Any:
        if isinstance(data, tuple):
            return tuple(map(self._pinned, data))
        if not isinstance(data, torch.Tensor):
            return data
        buffers = self._device.pinned_buffers(1, data.nbytes) if data.nbytes else ()
        for buffer in buffers:
            pinned = buffer[: data.nbytes].view(data.dtype).view(data.shape)
            # A matrix may be stored with its columns first; the device's copy has the same strides.
            return pinned.copy_(data) if data.is_contiguous() else pinned.view(data.mT.shape).copy_(data.mT).mT
        return data


def _empty_like(data: Any, where: torch.device) -> Any:
    if isinstance(data, tuple):
        return tuple(_empty_like(each, where) for each in data)
    return torch.empty_like(data, device=where) if isinstance(data, torch.Tensor) else data


def _tensors(data: Any) -> Iterator[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, tuple):
        for each in data:
            yield from _tensors(each)
