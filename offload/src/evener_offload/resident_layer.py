"""Slots on the device for experts of one layer, or of several layers in turn: which experts are in them, and the order
of copies and products.

Copies run on a stream of their own, products on the steps' stream. A copy waits for the last product with the expert
that the slot held. A product waits for the copies to its slots. Both wait on the device, so the host does not wait.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from evener.contracts.device import Device
from evener.contracts.quant import Packing
from evener.layers.builder import Builder
from evener_offload.expert_costs import Indices
from evener_offload.expert_slots import ExpertSlots, Numbers
from evener_offload.residents import Residents, Wave
from evener_offload.second_layout import Stacks


@runtime_checkable
class CopiesMany(Protocol):
    """A device that submits many copies in one call."""

    def copy_many(self, to: Numbers, sources: Numbers, sizes: Numbers, stream: Any = None) -> None:
        """Submit n copies on ``stream``, by default the current one: ``sizes[i]`` bytes from the host address
        ``sources[i]`` to the device address ``to[i]``. All are uint64 [n]. The caller keeps the memory alive."""


class ResidentLayer:
    """``count`` slots for experts of one layer, or of several equal layers.

    Args:
        layers: the stacks of each layer, in a layout of the device.
        experts: experts of a layer. Those of layer i are numbered from ``i * experts``.
        own: gets the slots, so that they are part of the memory plan.
        packings: the device's, by layout.
        stream: for the copies; None: the device has only one queue, which keeps the order.
        residents: decides which experts are in the slots; by default those that were used last.

    Attributes:
        gate_up, down: the slots for the two stacks.
        residents: which experts are in the slots.
        nbytes: bytes of one expert.
        quiet: how many of the last steps in a row missed no expert, and found no copy under way.
    """

    def __init__(
        self, layers: Sequence[Stacks], experts: int, own: Builder, packings: Mapping[str, Packing], count: int,
        device: Device, stream: Any, residents: Residents | None = None,
    ) -> None:  # fmt: skip
        self.gate_up, self.down = (
            ExpertSlots(own, each, packings[each[0].layout], count, device) for each in zip(*layers, strict=True)
        )
        self.residents, self.experts, self.quiet = residents or Residents(count), experts, 0
        self.nbytes = self.gate_up.nbytes + self.down.nbytes
        #: What ``places`` returned, after the number ``residents.copied`` at that time.
        self._map: tuple[int, Any] | None = None
        self._device, self._stream = device, stream
        self._many = device if isinstance(device, CopiesMany) else None
        #: Copies ahead that wait until the products with the experts now in their slots have been submitted.
        self._later: Wave | None = None
        #: For each slot: an event after the last product with it, and an event after a copy for which no product has
        #: waited yet.
        self._used: list[Any] = [None] * count
        self._copied: list[Any] = [None] * count

    def waves(self, needed: Iterable[int], elsewhere: Collection[int] = (), together: bool = False) -> Sequence[Wave]:
        """The waves in which the ``needed`` experts are computed. All of them must then be ``filled``. Experts that are
        in slots come first. Experts that are computed ``elsewhere`` are left out. ``together``: one wave, if there are
        slots for all."""
        late = self._late()
        waves = self.residents.waves(needed, late, elsewhere, together)
        calm = not late and not elsewhere and not any(wave.copied for wave in waves)
        self.quiet = self.quiet + 1 if calm else 0
        return waves

    def filled(self, waves: Sequence[Wave]) -> Iterator[Wave]:
        """Yield wave after wave. The experts of a wave are in their slots for work that the caller submits to the
        current stream before it asks for the next wave; after the last wave it must ask once more. Copies are
        submitted as early as their slots allow."""
        missing = [number for number, wave in enumerate(waves) if wave.copied]
        for number, wave in enumerate(waves):
            while missing and not _slots(waves[number : missing[0]]) & _slots([waves[missing[0]]]):
                self._copy(waves[missing.pop(0)])
            self._await_copies(wave)
            yield wave
            self._note_use(wave)
        if self._later is not None:
            later, self._later = self._later, None
            self._copy(later)

    def places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Maps of a single layer, int32 on the device: ``slots`` [experts, 1] and ``copies`` [experts] of
        ``ExpertMap``; and [slots], the expert in each slot (any number if the slot is empty)."""
        held = self.residents
        if self._map is None or self._map[0] != held.copied:
            slot_of, expert_of = np.full((self.experts, 1), -1, dtype=np.int32), np.zeros(held.count, dtype=np.int32)
            there = list(held.slots.values())
            slot_of[list(held.slots), 0] = there
            expert_of[there] = list(held.slots)
            copies = (slot_of[:, 0] >= 0).astype(np.int32)
            self._map = held.copied, tuple(map(self._device.upload, (slot_of, copies, expert_of)))
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self._map[1]
        return found

    def learn(self, expert: int, needed: Collection[int]) -> Any:
        """Start copying an expert that was computed elsewhere, for later steps. It does not take the slot of an expert
        that this step has ``needed``. Returns an event after the copy; None if nothing was copied, or if the device has
        only one queue."""
        if self._stream is None:
            return None
        wave = self.residents.learn(expert, needed)
        self._copy(wave)
        return next((self._copied[slot] for slot in wave.slots.values()), None)

    def exchange(self, pairs: Iterable[tuple[int, int | None]]) -> None:
        """Copy the first expert of each pair to the slot of the second one, or to an empty slot (None), on the current
        stream. No step may be running."""
        self._submit(self.residents.exchange(pairs))

    def note_use_of_all(self, event: Any) -> None:
        """Note that ``event`` is after the last work with all slots."""
        self._used = [event] * len(self._used)

    def forget_events(self) -> None:
        """Note that all copies and products have ended."""
        self._used, self._copied = ([None] * self.residents.count for _ in range(2))

    def copy_again(self) -> None:
        """Copy one expert again to its slot on the current stream, to measure the time of a copy."""
        expert, slot = next(iter(self.residents.slots.items()), (0, 0))
        self._submit(Wave({expert: slot}, (expert,)))

    def copy_half(self) -> None:
        """Copy experts that are not neighbours to half of the slots on the current stream, to measure the time. Only
        before the first step: ``residents`` does not know of these copies."""
        apart = 2 if 2 * self.residents.half <= self.experts else 1
        self._submit(Wave.of_copies({apart * slot: slot for slot in range(self.residents.half)}))

    def ahead(self, guessed: Sequence[int], wave: Wave | None = None) -> None:
        """Start copying experts that the layer will probably need, the likeliest first. ``wave``: the last wave of
        ``filled``, if its products are not submitted yet; copies to its slots are submitted after these products."""
        self.copy_ahead(self.residents.ahead(guessed), wave)

    def copy_ahead(self, ahead: Wave, wave: Wave | None = None) -> None:
        """As ``ahead``, for experts that ``residents`` has given slots."""
        busy = set[int]() if wave is None else {*wave.slots.values()}
        later = {expert: slot for expert, slot in ahead.slots.items() if slot in busy}
        if later:
            self._later = Wave.of_copies(later)
            ahead = Wave.of_copies({expert: slot for expert, slot in ahead.slots.items() if slot not in busy})
        self._copy(ahead)

    def _late(self) -> set[int]:
        """The experts in slots whose copies the device has not ended yet."""
        if ended := {event for event in _distinct(self._copied) if event.query()}:
            self._copied = [None if event in ended else event for event in self._copied]
        late = {slot for slot, event in enumerate(self._copied) if event is not None}
        return {expert for expert, slot in self.residents.slots.items() if slot in late} if late else set()

    def _copy(self, wave: Wave) -> None:
        slots = [wave.slots[expert] for expert in wave.copied]
        if not slots:
            return
        if self._stream is None:
            self._submit(wave)
            return
        # Each call names the stream: to make it the current stream takes longer than all these calls.
        for event in _distinct(map(self._used.__getitem__, slots)):
            event.wait(self._stream)
        self._submit(wave, self._stream)
        copied = self._device.new_event()
        copied.record(self._stream)
        for slot in slots:
            self._copied[slot] = copied

    def _submit(self, wave: Wave, stream: Any = None) -> None:
        experts, slots, counts = _runs(wave)
        number, stacks = int(experts[0]) // self.experts, (self.gate_up, self.down)
        places = [] if self._many is None else [each for stack in stacks if (each := stack.places(number)) is not None]
        if self._many is None or len(places) < len(stacks):
            with stream or nullcontext():
                for expert, slot, count in zip(experts.tolist(), slots.tolist(), counts.tolist(), strict=True):
                    for stack in stacks:
                        stack.copy(expert, slot, count)
            return
        to, sources, sizes = np.concatenate(places, axis=1)  # [tensors]
        runs = experts - number * self.experts, slots, counts
        within, first, many = (each.astype(np.uint64)[:, None] for each in runs)
        self._many.copy_many(
            (to + first * sizes).ravel(), (sources + within * sizes).ravel(), (many * sizes).ravel(), stream
        )

    def _await_copies(self, wave: Wave) -> None:
        for event in _distinct(map(self._copied.__getitem__, wave.slots.values())):
            event.wait()
        for slot in wave.slots.values():
            self._copied[slot] = None  # later work of this stream comes after this wait

    def _note_use(self, wave: Wave) -> None:
        if self._stream is not None:
            event = self._mark()
            for slot in wave.slots.values():
                self._used[slot] = event

    def _mark(self) -> Any:
        """A new event, recorded on the current stream."""
        event = self._device.new_event()
        event.record()
        return event


def _runs(wave: Wave) -> tuple[Indices, Indices, Indices]:
    """The copies of a wave as runs: first experts, first slots and counts, each int64 [runs]. In a run, consecutive
    experts go to consecutive slots."""
    experts = np.fromiter(wave.copied, np.int64, len(wave.copied))
    slots = np.fromiter(map(wave.slots.__getitem__, wave.copied), np.int64, len(experts))
    begins = np.ones(len(experts), bool)
    begins[1:] = (experts[1:] - experts[:-1] != 1) | (slots[1:] - slots[:-1] != 1)
    (firsts,) = begins.nonzero()
    return experts[firsts], slots[firsts], np.append(firsts[1:], len(experts)) - firsts


def _slots(waves: Sequence[Wave]) -> set[int]:
    return {slot for wave in waves for slot in wave.slots.values()}


def _distinct(events: Iterable[Any]) -> set[Any]:
    return {*events} - {None}
