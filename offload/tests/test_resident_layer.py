"""Slots that two layers share, on a device that takes many copies in one call."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from test_expert_slots import PinnedDevice, tensors

from evener.contracts.declared import StackedWeight, Table
from evener.contracts.quant import Packing
from evener.layers.builder import Builder
from evener.ops.reference.linear import PLAIN
from evener_conformance.kit.cases.blocks import random_part
from evener_kernels_triton.packed import PACKED
from evener_offload.expert_slots import Numbers
from evener_offload.resident_layer import ResidentLayer

EXPERTS, SLOTS = 6, 4


class ManyDevice(PinnedDevice):
    """Copies at once. ``calls``: how many copies each call had."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def copy_many(self, to: Numbers, sources: Numbers, sizes: Numbers, stream: Any = None) -> None:
        self.calls.append(len(to))
        for target, source, size in zip(to.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)


def shared(packing: Packing, storage: str, device: PinnedDevice) -> ResidentLayer:
    """The slots of two layers of ``EXPERTS``."""
    draw, layers = torch.Generator().manual_seed(3), []
    for layer in range(2):
        both = []
        for name in ("gate_up", "down"):
            experts = [[random_part(storage, 64, 256, draw)] for _ in range(EXPERTS)]
            stack = StackedWeight(
                f"{layer}.{name}", tuple(experts[0]), 64, 256, "float32", layout=packing.layout, experts=EXPERTS
            )
            stack.value = packing.pack_stack(experts, EXPERTS, "float32", torch.device("cpu"))
            both.append(stack)
        layers.append(tuple(both))
    build = Builder("float32", 64)
    made: Any = ResidentLayer(layers, EXPERTS, build, {packing.layout: packing}, SLOTS, device, None)  # type: ignore[arg-type]
    for table in build.weights:
        assert isinstance(table, Table)
        table.value = table.make(torch.device("cpu"))
    return made  # type: ignore[no-any-return]


def check(layer: ResidentLayer) -> None:
    """Each slot has the bytes of its expert."""
    assert layer.residents.slots
    for expert, slot in layer.residents.slots.items():
        number, within = divmod(expert, EXPERTS)
        for stack in (layer.gate_up, layer.down):
            there = stack.stacks[number].value
            assert there is not None
            for source, target in zip(tensors(there.data[within]), tensors(stack.value.data[slot]), strict=True):
                assert torch.equal(source.view(torch.uint8), target.view(torch.uint8))


@pytest.mark.parametrize(("packing", "storage"), [(PLAIN, "float32"), (PACKED, "q4_k"), (PACKED, "q8_0")])
def test_all_copies_of_a_wave_are_one_call(packing: Packing, storage: str) -> None:
    device = ManyDevice()
    layer = shared(packing, storage, device)
    for needed in ([0, 1, 4], [EXPERTS + 2, EXPERTS + 5], [3, 4, 5]):
        before = len(device.calls)
        for wave in layer.filled(layer.waves(needed, together=True)):
            assert sorted(wave.slots) == needed
        check(layer)
        assert len(device.calls) == before + 1
    places = layer.gate_up.places(0)
    assert places is not None and device.calls[0] == 2 * 2 * places.shape[1], "neighbours are one copy a tensor"


def test_copies_ahead_over_what_is_still_read_are_submitted_after_it() -> None:
    device = ManyDevice()
    layer = shared(PLAIN, "float32", device)
    later = [EXPERTS + 1, EXPERTS + 3]
    for wave in layer.filled(layer.waves([0, 1, 2], together=True)):
        layer.ahead(later, wave)
        held = dict(wave.slots)
        free = [slot for slot in layer.residents.slots.values() if slot not in held.values()]
        assert len(free) == 1, "one is copied at once, and one over what is read"
        for stack in (layer.gate_up, layer.down):
            there = stack.stacks[0].value
            assert there is not None
            for expert, slot in held.items():
                assert torch.equal(there.data[expert], stack.value.data[slot]), "nothing was overwritten"
    assert set(later) < set(layer.residents.slots)
    check(layer)
