"""Sets of slots for the experts that pass through the device in captured steps (``captured_passing``). Layers use the
sets in turn, also layers with different layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evener.contracts.declared import CallSite
from evener.contracts.device import Device
from evener.contracts.quant import Packing
from evener.layers.builder import Builder
from evener_offload.expert_slots import ExpertSlots, Room, room_bytes
from evener_offload.passing_stage import PassingStage
from evener_offload.placed_layers import stacks
from evener_offload.second_layout import Stacks, expert_bytes, kind_of

#: Number of sets. With two sets the link would be idle whenever the host is late. A third set is also filled before the
#: first layer is reached in which experts pass.
SETS = 3
#: If measured costs decide, a set has slots for so many percent of the experts without slots of their own. The host
#: reads memory at about 1.7 times the speed of the link. So both end together with 38% if tokens choose all experts,
#: and with a smaller percentage otherwise.
AUTO = 40


def slots_of(experts: int, percent: int | None, residents: int = 0) -> int:
    """Slots of a set for a layer with so many ``experts``, of which ``residents`` have slots of their own. ``percent``:
    of all of the layer's experts; None: measured costs decide."""
    absent = experts - residents
    return min(absent, max(1, round(absent * AUTO / 100 if percent is None else experts * percent / 100)))


@dataclass
class PassingLayer:
    """A layer in which experts pass.

    Attributes:
        number: in the order in which a step reaches the layers.
        slots: for gate and up projections, and for down projections.
        first: number of the layer's first expert in the stacks of ``slots``.
        experts: how many experts the layer has.
        count: how many slots a set has for the layer.
        absent: how many experts have no slots of their own.
        nbytes: bytes of an expert as the device reads it.
        stages: of both stacks, with the experts that pass; empty: the first experts pass, copied from the stacks.
    """

    number: int
    slots: tuple[ExpertSlots, ExpertSlots]
    first: int
    experts: int
    count: int
    absent: int
    nbytes: int
    stages: Sequence[PassingStage] = ()

    @property
    def stage_bytes(self) -> int:
        """Bytes of host memory for the layer's stages."""
        return self.count * self.nbytes

    def passing(self, part: float) -> int:
        """How many experts pass if ``part`` (0 to 1) of them should: at least one, or none if the part is 0."""
        return min(self.count, max(1, round(part * self.experts))) if part else 0

    def copy(self, count: int) -> None:
        """Start copying the first ``count`` experts that pass to the slots, on the current stream."""
        for stage in self.stages:
            stage.copy(count)
        for each in () if self.stages else self.slots:
            each.copy(self.first, 0, count)


class PassingSlots:
    """The sets of slots.

    Args:
        sites: call sites of the layers, in the order in which a step reaches them.
        found: by path: the experts as the device reads them.
        own: gets the slots, so that they are part of the memory plan.
        packings: the device's, by layout.
        percent, residents: see ``slots_of``.

    Attributes:
        sets: number of sets.
        layer: the layers by path.
        order: the layers by number.
    """

    def __init__(
        self, sites: Sequence[CallSite], found: Mapping[str, Stacks], own: Builder, packings: Mapping[str, Packing],
        device: Device, percent: int | None, residents: int,
    ) -> None:  # fmt: skip
        self.sets, layers, alignment = min(SETS, len(sites)), dict[str, PassingLayer](), device.capabilities.alignment
        for which in range(self.sets):
            kinds: dict[Any, list[tuple[int, CallSite]]] = {}
            for number in range(which, len(sites), self.sets):
                kinds.setdefault(kind_of(found[sites[number].path]), []).append((number, sites[number]))
            bytes_of = {kind: expert_bytes(found[group[0][1].path], packings) for kind, group in kinds.items()}
            counts = {
                kind: slots_of(group[0][1].static["experts"], percent, residents) for kind, group in kinds.items()
            }
            most = max(counts[kind] * bytes_of[kind] for kind in kinds)
            room = Room(own, f"passing experts {which}", most, max(counts.values()), alignment)
            for kind, group in kinds.items():
                gate_up, down = (
                    ExpertSlots(own, each, packings[each[0].layout], counts[kind], device, room)
                    for each in zip(*(found[site.path] for _, site in group), strict=True)
                )
                room.hold((gate_up, down))
                for place, (number, site) in enumerate(group):
                    experts, nbytes = site.static["experts"], bytes_of[kind]
                    layers[site.path] = PassingLayer(
                        number, (gate_up, down), place * experts, experts, counts[kind], experts - residents, nbytes
                    )
        self.layer = dict(sorted(layers.items(), key=lambda each: each[1].number))
        self.order = list(self.layer.values())

    @staticmethod
    def room(sites: Sequence[CallSite], packings: Mapping[str, Packing], percent: int | None, alignment: int) -> int:
        """Bytes of device memory that the sets may need. The stacks of ``sites`` have layouts of the device's
        ``packings``."""
        counts = [slots_of(site.static["experts"], percent) for site in sites]
        each = (n * expert_bytes(stacks(site), packings) for n, site in zip(counts, sites, strict=True))
        return min(SETS, len(sites)) * room_bytes(max(each), max(counts), alignment) if sites else 0
