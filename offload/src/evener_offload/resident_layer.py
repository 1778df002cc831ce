"""One layer's slots on the device, what is in them, and the order of copies to them and of products with them.

Copies run on a stream of their own, products on the steps' stream. A copy waits on the device for the last product with
what the slot held before, and a product for the copies to its slots: the host waits for neither.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from evener.contracts.declared import CallSite
from evener.contracts.device import Device
from evener.layers.builder import Builder
from evener.resolution.resolver import Resolver
from evener_offload.expert_slots import ExpertSlots
from evener_offload.placed_layers import stacks
from evener_offload.residents import Residents, Wave


class ResidentLayer:
    """Slots for ``count`` experts of one layer.

    Args:
        site: the layer's ``moe_block``.
        own: gets the slots, so that they are part of the memory plan.
        resolver: the device's.
        stream: of the copies; None: the device has one queue, which keeps their order.

    Attributes:
        gate_up, down: the slots of its two stacks.
        residents: the experts in them.
        experts: how many the layer has.
        nbytes: of one expert.
    """

    def __init__(
        self, site: CallSite, own: Builder, resolver: Resolver, count: int, device: Device, stream: Any
    ) -> None:
        packings = resolver.packings_by_layout
        self.gate_up, self.down = (ExpertSlots(own, s, packings[s.layout], count, device) for s in stacks(site))
        self.residents, self.experts = Residents(count), site.static["experts"]
        self.nbytes = self.gate_up.nbytes + self.down.nbytes
        self._device, self._stream = device, stream
        #: For each slot an event after the last product with it, and one after a copy that no product has waited for.
        self._used: list[Any] = [None] * count
        self._copied: list[Any] = [None] * count

    def filled(self, needed: Iterable[int], elsewhere: Collection[int] = ()) -> Iterator[Wave]:
        """Wave after wave of the ``needed`` experts, each in its slots for work that is submitted to the current stream
        before the next wave is asked for. Experts that are on the device come first. Copies of the others are submitted
        as early as their slots allow it. Those that are computed ``elsewhere`` are left out."""
        waves = self.residents.waves(needed, self._late(), elsewhere)
        missing = [number for number, wave in enumerate(waves) if wave.copied]
        for number, wave in enumerate(waves):
            while missing and not _slots(waves[number : missing[0]]) & _slots([waves[missing[0]]]):
                self._copy(waves[missing.pop(0)])
            self._await_copies(wave)
            yield wave
            self._note_use(wave)

    def learn(self, expert: int, needed: Collection[int]) -> Any:
        """Start copying an expert that was computed elsewhere, for later steps; not over one that this step has
        ``needed``. Returns an event after it; None if there is nothing to wait for."""
        if self._stream is None:
            return None
        wave = self.residents.learn(expert, needed)
        self._copy(wave)
        return next((self._copied[slot] for slot in wave.slots.values()), None)

    def copy_again(self) -> None:
        """Copy one expert to where it is, to measure how long that takes. On the current stream."""
        expert, slot = next(iter(self.residents.slots.items()), (0, 0))
        self._submit(Wave({expert: slot}, copied=True))

    def ahead(self, guessed: Sequence[int]) -> None:
        """Start copying experts that the layer will probably need; the likeliest first."""
        self._copy(self.residents.ahead(guessed))

    def _late(self) -> set[int]:
        """The slots' experts whose copies are under way, as the device says now."""
        for slot, event in enumerate(self._copied):
            if event is not None and event.query():
                self._copied[slot] = None
        return {expert for expert, slot in self.residents.slots.items() if self._copied[slot] is not None}

    def _copy(self, wave: Wave) -> None:
        if not wave.slots:
            return
        if self._stream is None:
            self._submit(wave)
            return
        with self._stream:
            for event in _distinct(self._used[slot] for slot in wave.slots.values()):
                event.wait()
            self._submit(wave)
            copied = self._mark()
        for slot in wave.slots.values():
            self._copied[slot] = copied

    def _submit(self, wave: Wave) -> None:
        for expert, slot in wave.slots.items():
            self.gate_up.copy(expert, slot)
            self.down.copy(expert, slot)

    def _await_copies(self, wave: Wave) -> None:
        for event in _distinct(self._copied[slot] for slot in wave.slots.values()):
            event.wait()
        for slot in wave.slots.values():
            self._copied[slot] = None  # later work of this stream waits too

    def _note_use(self, wave: Wave) -> None:
        if self._stream is not None:
            event = self._mark()
            for slot in wave.slots.values():
                self._used[slot] = event

    def _mark(self) -> Any:
        """An event after what was submitted to the current stream."""
        event = self._device.new_event()
        event.record()
        return event


def _slots(waves: Sequence[Wave]) -> set[int]:
    return {slot for wave in waves for slot in wave.slots.values()}


def _distinct(events: Iterable[Any]) -> Iterable[Any]:
    return {id(event): event for event in events if event is not None}.values()
