"""A stack of experts in host memory, and slots for some of them on the device, both in a layout of the device's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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
        stack: all experts.
        weight: the declaration of the slots, as kernels see it: a stack of ``count`` matrices.
        nbytes: of one expert.
    """

    def __init__(self, own: Builder, stack: StackedWeight, packing: Packing, count: int, device: Device) -> None:
        self.stack, self._device = stack, device
        self.weight = replace(stack, name=f"{stack.name} on the device", experts=count, placement=None)
        self.nbytes = packing.nbytes(stack.parts, stack.dtype)
        self._table = own.table(("slots of experts", stack.name), count * self.nbytes, self._make)

    @property
    def value(self) -> PackedWeight:
        """The slots."""
        return cast("PackedWeight", self._table.value)

    def copy(self, expert: int, slot: int) -> None:
        """Start copying an expert to a slot, on the current stream."""
        assert self.stack.value is not None, "weights are loaded"
        pairs = zip(_tensors(self.stack.value.data[expert]), _tensors(self.value.data[slot]), strict=True)
        for source, target in pairs:
            target.copy_(source, non_blocking=True)

    def _make(self, where: torch.device) -> Any:
        """Empty slots. The experts move to page-locked memory, if the device has any: copies from it are
        asynchronous."""
        whole, count = self.stack.value, self.weight.experts
        assert whole is not None, "experts on the host are loaded first"
        self.stack.value = replace(whole, data=map_tensors(whole.data, self._pinned))

        def empty(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(tensor, device=where)

        def some(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_contiguous() or tensor.shape[0] != self.stack.experts:
                raise ConfigError(f"infer.resident_experts cannot copy {self.stack.name}, which is packed as "
                                  f"{whole.layout}; use infer.cpu_layer_num alone: then the host computes")  # fmt: skip
            return torch.empty((count, *tensor.shape[1:]), dtype=tensor.dtype, device=where)

        if isinstance(whole.data, tuple):
            made: Any = tuple(map_tensors(whole.data[0], empty) for _ in range(count))
        else:
            made = map_tensors(whole.data, some)
        if "shape" in getattr(made, "__dataclass_fields__", ()):
            made = replace(made, shape=(count, *whole.shape[1:]))
        return replace(whole, data=made, shape=(count, *whole.shape[1:]), nbytes=count * self.nbytes)

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        for buffer in self._device.pinned_buffers(1, tensor.nbytes) if tensor.nbytes else ():
            pinned = buffer[: tensor.nbytes].view(tensor.dtype)
            if tensor.is_contiguous():
                return pinned.view(tensor.shape).copy_(tensor)
            return pinned.view(tensor.mT.shape).copy_(tensor.mT).mT  # stored with its columns first
        return tensor


def map_tensors(data: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same packed data with other tensors, in tuples and the fields of dataclasses; a tensor that occurs twice is
    changed once."""
    known: dict[int, torch.Tensor] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in known:
                known[id(value)] = change(value)
            return known[id(value)]
        if type(value) is tuple:  # a named tuple is a description
            return tuple(map(walk, value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            return dataclasses.replace(value, **{name: walk(field) for name, field in fields.items()})
        return value

    return walk(data)


def _tensors(data: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(data, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found
