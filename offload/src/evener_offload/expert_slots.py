"""Stacks of experts in host memory, and slots for some of them on the device, all in the device's layout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from evener.contracts.declared import StackedWeight
from evener.contracts.device import Device
from evener.contracts.quant import PackedWeight, Packing
from evener.errors import ConfigError
from evener.layers.builder import Builder

#: Addresses, or numbers of bytes: uint64.
Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
#: Numbers of experts or slots: int64 [n].
Indices: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
#: Tensors of an expert, at most. Between two tensors of a room, up to ``alignment`` bytes are lost.
_TENSORS = 16


class Room:
    """Memory of the device that slots of different kinds of stacks use in turn.

    Args:
        own: gets the memory as a table, so that it is part of the memory plan.
        name: different for each room.
        nbytes: bytes of all experts that are in the room at the same time.
        count: how many experts these are.
        alignment: of each tensor, in bytes.
    """

    def __init__(self, own: Builder, name: str, nbytes: int, count: int, alignment: int) -> None:
        self._alignment, self._used = alignment, 0
        #: For each kind of layers, the slots that are in the room at the same time.
        self._kinds: list[Sequence[ExpertSlots]] = []
        self._nbytes = room_bytes(nbytes, count, alignment)
        own.table(("room for experts", name), self._nbytes, self._make)

    def hold(self, kind: Sequence[ExpertSlots]) -> None:
        """Put these slots into the room, one after the other. Slots of other calls use the same memory in turn."""
        self._kinds.append(kind)

    def take(self, shape: Sequence[int], dtype: torch.dtype, raw: torch.Tensor) -> torch.Tensor:
        """A tensor in the next free bytes of ``raw``, the room's memory."""
        begin = -(-self._used // self._alignment) * self._alignment
        self._used = begin + math.prod(shape) * dtype.itemsize
        assert self._used <= raw.numel(), "what is lost between tensors is more than was planned"
        return raw[begin : self._used].view(dtype).view(*shape)

    def _make(self, where: torch.device) -> torch.Tensor:
        raw = torch.empty(self._nbytes, dtype=torch.uint8, device=where)
        for kind in self._kinds:
            self._used = 0
            for slots in kind:
                slots.make_in(raw, where)
        return raw


def room_bytes(nbytes: int, count: int, alignment: int) -> int:
    """Bytes of a room for ``count`` experts that have ``nbytes`` bytes in all."""
    return nbytes + _TENSORS * count * alignment


class ExpertSlots:
    """The slots of one stack, or of equal stacks of several layers.

    Args:
        own: gets the slots as a table, so that they are part of the memory plan.
        stacks: all experts; their weights are loaded to the host before tables of the device are made.
        packing: of the stacks.
        count: number of slots.
        room: the slots' memory; by default they have memory of their own.

    Attributes:
        stacks: all experts. Expert j of stack i has the number ``i * experts + j``.
        weight: the declaration of the slots for kernels: a stack of ``count`` matrices.
        nbytes: bytes of one expert's matrix.
    """

    def __init__(
        self, own: Builder, stacks: Sequence[StackedWeight], packing: Packing, count: int, device: Device,
        room: Room | None = None,
    ) -> None:  # fmt: skip
        self.stacks, self._device, stack = stacks, device, stacks[0]
        self.weight = replace(stack, name=f"{stack.name} on the device", experts=count, placement=None)
        self.nbytes = packing.nbytes(stack.parts, stack.dtype)
        self._experts = stack.experts
        #: By stack (-1: the slots) and index (-1: the whole stack): tensors, see ``_parts``.
        self._known: dict[tuple[int, int], list[torch.Tensor]] = {}
        #: By stack, see ``places``.
        self._places: dict[int, Numbers | None] = {}
        self._room, self._table, self._value = room, None, None
        if room is None:
            self._table = own.table(("slots of experts", stack.name), count * self.nbytes, self._make)

    @property
    def value(self) -> PackedWeight:
        """The slots."""
        return cast("PackedWeight", self._value if self._table is None else self._table.value)

    def make_in(self, raw: torch.Tensor, where: torch.device) -> None:
        """Make the slots in the memory ``raw`` of their room."""
        self._value = self._make(where, raw)

    def copy(self, expert: int, slot: int, count: int = 1) -> None:
        """Start copying ``count`` experts of one layer to as many slots from ``slot`` on, on the current stream."""
        for source, target in zip(self.parts(expert, count), self.parts_of_slots(slot, count), strict=True):
            target.copy_(source, non_blocking=True)

    def parts(self, expert: int, count: int) -> list[torch.Tensor]:
        """The tensors of ``count`` experts of one layer in host memory. If possible, one tensor holds all experts; else
        first the tensors of the first expert, then those of the second, and so on."""
        number, within = divmod(expert, self._experts)
        return self._parts(number, within, count)

    def parts_of_slots(self, slot: int, count: int) -> list[torch.Tensor]:
        """The same for ``count`` slots."""
        return self._parts(-1, slot, count)

    def places(self, number: int) -> Numbers | None:
        """For each tensor of stack ``number``: the address of the first slot, the address of the first expert, and the
        bytes of an expert: uint64 [3, tensors]. None: use ``copy``, because an expert's bytes are not contiguous, or
        are in another order on the other side."""
        if number not in self._places:
            self._places[number] = self._place(number)
        return self._places[number]

    def _place(self, number: int) -> Numbers | None:
        stack = self.stacks[number].value
        assert stack is not None, "weights are loaded"
        if isinstance(stack.data, tuple):
            return None
        found = []
        for source, target in zip(_tensors(stack.data), _tensors(self.value.data), strict=True):
            size = source[0].nbytes
            dense = source.stride(0) * source.element_size() == target.stride(0) * target.element_size() == size
            if not dense or source.stride() != target.stride():
                return None
            found.append((target.data_ptr(), source.data_ptr(), size))
        return np.array(found, dtype=np.uint64).T

    def _parts(self, stack: int, index: int, count: int) -> list[torch.Tensor]:
        """The tensors of ``count`` matrices from ``index`` on, of a stack or (-1) of the slots."""
        known = self._known.get((stack, index if count == 1 else -1))
        if known is None:
            value = self.value if stack < 0 else self.stacks[stack].value
            assert value is not None, "weights are loaded"
            if isinstance(value.data, tuple) and count > 1:
                return [each for at in range(index, index + count) for each in self._parts(stack, at, 1)]
            known = _tensors(value.data[index] if count == 1 else value.data)
            self._known[stack, index if count == 1 else -1] = known
        return known if count == 1 else [tensor[index : index + count] for tensor in known]

    def _make(self, where: torch.device, raw: torch.Tensor | None = None) -> Any:
        """Empty slots, in memory of their own or in ``raw``. Moves the experts to page-locked memory, if the device has
        any: only copies from such memory are asynchronous."""
        self._known.clear()
        self._places.clear()
        for stack in self.stacks:
            assert stack.value is not None, "experts on the host are loaded first"
            stack.value = replace(stack.value, data=map_tensors(stack.value.data, self._pinned))
        whole, count = self.stacks[0].value, self.weight.experts
        assert whole is not None, "just set"

        def new(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            if self._room is None or raw is None:
                return torch.empty(tuple(shape), dtype=dtype, device=where)
            return self._room.take(shape, dtype, raw)

        def empty(tensor: torch.Tensor) -> torch.Tensor:
            return new(tensor.shape, tensor.dtype) if tensor.is_contiguous() else new(tensor.mT.shape, tensor.dtype).mT

        def some(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_contiguous() or tensor.shape[0] != self._experts:
                raise ConfigError(f"{self.stacks[0].name} cannot be copied by expert, because it is packed as "
                                  f"{whole.layout}; use infer.cpu_layer_num, offload.stream_prompts=off and "
                                  "offload.pass_experts=off, so that the host computes")  # fmt: skip
            return new((count, *tensor.shape[1:]), tensor.dtype)

        if isinstance(whole.data, tuple):
            made: Any = tuple(map_tensors(whole.data[0], empty) for _ in range(count))
        else:
            made = map_tensors(whole.data, some)
        if "shape" in getattr(made, "__dataclass_fields__", ()):
            made = replace(made, shape=(count, *whole.shape[1:]))
        return replace(whole, data=made, shape=(count, *whole.shape[1:]), nbytes=count * self.nbytes)

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        locked = None if tensor.is_pinned() else page_locked(self._device, tensor)
        return tensor if locked is None else locked


def page_locked(device: Device, tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy of ``tensor`` in page-locked memory of the host; None if ``device`` has none."""
    for buffer in device.pinned_buffers(1, tensor.nbytes) if tensor.nbytes else ():
        pinned = buffer[: tensor.nbytes].view(tensor.dtype)
        if tensor.is_contiguous():
            return pinned.view(tensor.shape).copy_(tensor)
        return pinned.view(tensor.mT.shape).copy_(tensor.mT).mT  # the tensor is stored by columns
    return None


def map_tensors(data: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of packed data in which ``change`` has replaced each tensor, in tuples and in fields of dataclasses. A
    tensor that occurs twice is changed once."""
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
