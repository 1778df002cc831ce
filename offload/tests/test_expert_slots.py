"""Slots hold exactly what the stack holds, in every layout that a device's kernels may read."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from evener.contracts.declared import StackedWeight, Table
from evener.contracts.quant import Packing
from evener.errors import ConfigError
from evener.layers.builder import Builder
from evener.ops.reference.linear import PLAIN
from evener_conformance.kit.cases.blocks import random_part
from evener_conformance.reference.device import HostDevice
from evener_conformance.simulated.kernels import ColumnsFirst
from evener_kernels_triton.packed import PACKED
from evener_kernels_triton.stored import STORED
from evener_offload.expert_slots import ExpertSlots, Room, map_tensors, room_bytes

EXPERTS, SLOTS = 6, 4


class PinnedDevice(HostDevice):
    """Gives out buffers as if they were page-locked."""

    def __init__(self) -> None:
        super().__init__(0)
        self.buffers: list[torch.Tensor] = []

    def pinned_buffers(self, count: int, nbytes: int) -> list[torch.Tensor]:
        self.buffers += (made := [torch.empty(nbytes, dtype=torch.uint8) for _ in range(count)])
        return made


def stack_of(packing: Packing, storage: str) -> StackedWeight:
    draw = torch.Generator().manual_seed(3)
    experts = [[random_part(storage, rows, 256, draw) for rows in (32, 32)] for _ in range(EXPERTS)]
    stack = StackedWeight("stack", tuple(experts[0]), 64, 256, "float32", layout=packing.layout, experts=EXPERTS)
    stack.value = packing.pack_stack(experts, EXPERTS, "float32", torch.device("cpu"))
    return stack


def slots_of(packing: Packing, storage: str, device: HostDevice) -> tuple[StackedWeight, ExpertSlots]:
    stack, build = stack_of(packing, storage), Builder("float32", 64)
    made = ExpertSlots(build, [stack], packing, SLOTS, device)
    (table,) = build.weights
    assert isinstance(table, Table)
    table.value = table.make(torch.device("cpu"))
    assert made.value.nbytes == table.nbytes
    return stack, made


def tensors(data: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(data, note)
    return found


every_layout = pytest.mark.parametrize(
    ("packing", "storage"),
    [(PLAIN, "float32"), (ColumnsFirst(), "float32"), (STORED, "e4m3 by row"), (STORED, "int8 by group"),
     (PACKED, "q4_k"), (PACKED, "q8_0"), (PACKED, "uint4 by 32, zeros"), (PACKED, "uint4 by 64, act")],
    ids=lambda value: getattr(value, "layout", value),
)  # fmt: skip


@every_layout
def test_experts_are_copied_to_slots_bit_for_bit(packing: Packing, storage: str) -> None:
    device = PinnedDevice()
    stack, slots = slots_of(packing, storage, device)
    assert stack.value is not None
    held = {buffer.untyped_storage().data_ptr() for buffer in device.buffers}
    assert {each.untyped_storage().data_ptr() for each in tensors(stack.value.data)} == held
    assert slots.value.shape == (SLOTS, 64, 256) and slots.weight.experts == SLOTS
    for expert, slot in ((5, 0), (0, 3), (2, 1), (4, 3)):
        slots.copy(expert, slot)
    slots.copy(3, 2)
    check(stack, slots, ((5, 0), (2, 1), (3, 2), (4, 3)))
    slots.copy(1, 0, 3)
    check(stack, slots, ((1, 0), (2, 1), (3, 2), (4, 3)))


def check(stack: StackedWeight, slots: ExpertSlots, places: Sequence[tuple[int, int]]) -> None:
    assert stack.value is not None
    for expert, slot in places:
        pairs = zip(tensors(stack.value.data[expert]), tensors(slots.value.data[slot]), strict=True)
        for source, target in pairs:
            assert (
                torch.equal(source.view(torch.uint8), target.view(torch.uint8))
                if source.is_contiguous()
                else (torch.equal(source, target))
            )
            assert source.stride() == target.stride()


@every_layout
def test_slots_of_unlike_layouts_take_turns_in_a_room(packing: Packing, storage: str) -> None:
    """Two stacks of one layer are in it beside each other, then two of another layer."""
    build, device, alignment = Builder("float32", 64), PinnedDevice(), 64
    kinds = [[stack_of(*each) for each in both] for both in (((packing, storage), (PLAIN, "float32")),
             ((PLAIN, "float32"), (packing, storage)))]  # fmt: skip
    by_layout = {packing.layout: packing, PLAIN.layout: PLAIN}
    each = sum(by_layout[stack.layout].nbytes(stack.parts, stack.dtype) for stack in kinds[0])
    room = Room(build, "room", SLOTS * each, SLOTS, alignment)
    slots = [[ExpertSlots(build, [stack], by_layout[stack.layout], SLOTS, device, room) for stack in both]
             for both in kinds]  # fmt: skip
    for both in slots:
        room.hold(both)
    (table,) = build.weights
    assert isinstance(table, Table) and table.nbytes == room_bytes(SLOTS * each, SLOTS, alignment)
    table.value = table.make(torch.device("cpu"))
    assert table.value.nbytes == table.nbytes
    for stacks, both in zip(kinds, slots, strict=True):
        for made in both:
            made.copy(1, 0, 3)
            made.copy(5, 3)
            places = {tensor.untyped_storage().data_ptr() for tensor in tensors(made.value.data)}
            assert places == {table.value.untyped_storage().data_ptr()}
            assert not any(
                (tensor.data_ptr() - table.value.data_ptr()) % alignment for tensor in tensors(made.value.data)
            )
        for stack, made in zip(stacks, both, strict=True):
            check(stack, made, ((1, 0), (2, 1), (3, 2), (5, 3)))


def test_a_layout_without_a_place_for_each_expert_is_refused() -> None:
    stack, _ = slots_of(PLAIN, "float32", HostDevice(0))
    assert stack.value is not None
    build = Builder("float32", 64)
    ExpertSlots(build, [stack], PLAIN, SLOTS, HostDevice(0))
    object.__setattr__(stack.value, "data", stack.value.data[:3])
    (table,) = build.weights
    assert isinstance(table, Table)
    words = r"stack cannot be copied by expert, because it is packed as plain; use infer.cpu_layer_num, "
    with pytest.raises(ConfigError, match=words):
        table.make(torch.device("cpu"))


@pytest.mark.parametrize(("packing", "storage"), [(PLAIN, "float32"), (PACKED, "q4_k"), (PACKED, "q8_0")])
def test_addresses_are_those_of_the_bytes_that_a_copy_moves(packing: Packing, storage: str) -> None:
    stack, slots = slots_of(packing, storage, PinnedDevice())
    places = slots.places(0)
    assert places is not None
    for to, source, size in places.T.tolist():
        for expert, slot in ((2, 1), (5, 0)):
            ctypes.memmove(to + slot * size, source + expert * size, size)
    check(stack, slots, ((2, 1), (5, 0)))


def test_tensors_in_another_order_on_one_side_have_no_addresses() -> None:
    _, slots = slots_of(PLAIN, "float32", PinnedDevice())
    assert slots.places(0) is not None
    object.__setattr__(slots.value, "data", slots.value.data.transpose(1, 2))
    slots._places.clear()
    assert slots.places(0) is None
