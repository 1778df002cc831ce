"""Captured steps of layers with slots: the device computes the experts in slots, and calls the host for all others
(``captured_experts``). No step waits for copies of experts, and the host submits no single layer. In steps of many
requests a part of the experts without slots may pass through slots that layers share (``captured_passing``).

The map of the device has the experts in slots; the maps of the host have the others. Captures read the maps at fixed
addresses, so maps are written only while no step runs.

The device counts which experts are chosen. From time to time, the most chosen experts on the host take the slots of the
least chosen ones, for at most a part of the time (least frequently used, with ageing counts). Experts that pass
(``Residents.passing``) never take a slot so. If an eager step has left one in a slot, captured steps do not compute it
there, and it leaves first. So one map of the device serves steps in which more, fewer or no experts pass; only the
host's maps differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from evener.contracts.device import Device
from evener.contracts.ops import OpFunction
from evener.contracts.weights import MoEWeights
from evener_offload.captured_experts import CapturedExperts
from evener_offload.captured_passing import Start
from evener_offload.choice_counts import ChoiceCounts, clearly
from evener_offload.resident_layer import ResidentLayer
from evener_offload.slot_products import SlotProducts


class _Maps:
    """Where the experts of one layer are.

    Args:
        whole: int32 on the device, for all layers. This layer's part: the slot of each expert (-1: none), whether it
            has one (1 or 0), and the expert in each slot.
        at: where this layer's part begins.
        on_host: the layer's weights as the host reads them.
    """

    def __init__(self, layer: ResidentLayer, whole: torch.Tensor, at: int, on_host: MoEWeights) -> None:
        experts, count = layer.experts, layer.residents.count
        self._layer, self.at, self.size = layer, at, 2 * experts + count
        self.slots = whole[at : at + experts].view(-1, 1)
        self.copies = whole[at + experts : at + 2 * experts]
        self.experts = whole[at + 2 * experts : at + self.size]
        self._weights = on_host
        #: By how many experts pass: the host's weights, with a map of the experts that have no slot and do not pass.
        self._on_host: dict[int, MoEWeights] = {}

    def on_host(self, passing: int) -> MoEWeights | None:
        """See ``ForHost``; None: there is no such map yet."""
        return self._on_host.get(passing)

    def add(self, passing: int) -> None:
        """Add a map for steps in which so many experts pass, and leave it to ``write``. An existing map is kept."""
        if passing in self._on_host:
            return
        slots = torch.full((self._layer.experts, 1), -1, dtype=torch.int32)
        copies = torch.zeros(self._layer.experts, dtype=torch.int32)
        self._on_host[passing] = self._weights._replace(slots=slots, copies=copies)

    def write(self, into: np.ndarray[Any, Any]) -> None:
        """Write the device's map into this layer's part of ``into``, and all maps of the host in place."""
        layer, here = self._layer, self._layer.residents
        held = {expert: slot for expert, slot in here.slots.items() if expert >= here.passing}
        slot_of, expert_of = np.full(layer.experts, -1, dtype=np.int32), np.zeros(layer.residents.count, dtype=np.int32)
        there = list(held.values())
        slot_of[list(held)], expert_of[there] = there, list(held)
        into[self.at : self.at + self.size] = np.concatenate([slot_of, slot_of >= 0, expert_of])
        numbers = np.arange(layer.experts)
        for passing, on_host in self._on_host.items():
            absent = (slot_of < 0) & (numbers >= passing)
            on_host.slots.numpy()[:, 0] = np.where(absent, numbers, -1)
            on_host.copies.numpy()[:] = absent


class CapturedResidents:
    """Submits the work of layers with experts in slots.

    Args:
        layers: by path of the call site.
        captured: submits the host's part.
        most_passing: takes a path; returns the largest number of the layer's first experts that pass in some step, as
            far as that is known.

    Attributes:
        exchanged: how many experts took another one's slot.
        counts: in how many steps each expert was chosen.
    """

    def __init__(
        self, device: Device, layers: Mapping[str, ResidentLayer], captured: CapturedExperts,
        most_passing: Callable[[str], int],
    ) -> None:  # fmt: skip
        self._device, self._layers, self._captured, self.exchanged = device, layers, captured, 0
        self._most_passing = most_passing
        self._note_passing()
        sizes = [2 * layer.experts + layer.residents.count for layer in layers.values()]
        self._at = dict(zip(layers, [0, *np.cumsum(sizes).tolist()], strict=False))
        self._host_map = np.zeros(sum(sizes), dtype=np.int32)
        self._map: torch.Tensor | None = None
        self._maps: dict[str, _Maps] = {}
        self._number = {path: number for number, path in enumerate(layers)}
        most = max(layer.experts for layer in layers.values())
        self.counts = ChoiceCounts(device, len(layers), most)
        #: Whether an eager step has changed what is in slots; whether captured steps may still be running.
        self._stale, self._under_way = True, False

    def counters(self) -> Mapping[str, int]:
        """Captured steps, bytes of experts that the host read, microseconds in which the host computed, bytes of
        experts that passed through the device, and experts that took another one's slot.

        Raises:
            EvenerError: the host failed in a captured step.
        """
        self._captured.check()
        work = self._captured.work
        return {
            "host_expert_captured_steps": self._captured.steps,
            "host_expert_read_bytes": work.read_bytes,
            "host_expert_microseconds": work.nanoseconds // 1000,
            "host_expert_passed_bytes": work.passed_bytes,
            "expert_exchanges": self.exchanged,
        }

    def before_eager_step(self) -> None:
        """To be called before an eager step is submitted: lets its copies wait for captured steps that read slots."""
        self._stale = True
        if self._under_way:
            self._under_way = False
            event = self._device.new_event()
            event.record()
            for layer in self._layers.values():
                layer.note_use_of_all(event)

    def replayed(self, rows: int) -> None:
        """See ``Placement.replayed``.

        Raises:
            EvenerError: the host failed in an earlier step.
        """
        self._captured.replayed(rows)
        self._under_way = True
        if self.counts.replayed():
            self._review()
        if self._stale:
            self._device.synchronize()
            self._write()

    def start(
        self, path: str, products: SlotProducts, compute: OpFunction, expert_bytes: int, x: torch.Tensor,
        ids: torch.Tensor, weights: torch.Tensor, w: MoEWeights, on_host: Callable[[], MoEWeights],
        passing: Start | None = None,
    ) -> Callable[[], torch.Tensor]:  # fmt: skip
        """Submit a layer. Returns a function that lets the device wait for the result, and returns it: [T, hidden].

        Args:
            compute: ``routed_experts`` on the host.
            expert_bytes: bytes of one expert's weights, as the host reads them.
            on_host: returns the layer's weights as the host reads them.
            passing: starts the step if experts pass in it.

        Raises:
            EngineError: the step has too many rows for one call.
        """

        for_host = partial(self._for_host, path, on_host)
        rest, wait, maps = for_host(0), None, self._maps[path]
        if passing is not None:
            wait = passing((x, ids, weights), w, for_host)
        others = wait or self._captured.start(path, compute, expert_bytes, x, ids, weights, rest)
        y = products.at_once(x, ids, weights, w, (maps.slots, maps.copies, maps.experts))
        self.counts.note(self._number[path], ids)  # while the host computes
        return lambda: y.add_(others())

    def _for_host(self, path: str, on_host: Callable[[], MoEWeights], passing: int) -> MoEWeights:
        """See ``ForHost``."""
        if self._map is None:
            self._map = self._device.upload(self._host_map)
            self.counts.prepare()
        if path not in self._maps:
            self._maps[path] = _Maps(self._layers[path], self._map, self._at[path], on_host())
        maps = self._maps[path]
        if maps.on_host(passing) is None or passing > self._layers[path].residents.passing:
            maps.add(passing)
            self._device.synchronize()
            self._write()
        found = maps.on_host(passing)
        assert found is not None, "just added"
        return found

    def _note_passing(self) -> None:
        for path, layer in self._layers.items():
            layer.residents.passing = self._most_passing(path)

    def _write(self) -> None:
        """Write all maps. No step runs."""
        self._note_passing()
        for path, maps in self._maps.items():
            self._layers[path].forget_events()
            maps.write(self._host_map)
        if self._map is not None:
            self._map.copy_(self._device.upload(self._host_map))
        self._stale = False

    def _review(self) -> None:
        """Let the most chosen experts on the host take the slots of the least chosen ones."""
        most = self.counts.most()
        chosen = dict[str, list[tuple[int, int | None]]]()
        for _, path, expert, leaves in sorted(self._worth(), reverse=True)[:most]:
            chosen.setdefault(path, []).append((expert, leaves))
        if not chosen:
            return
        self._device.synchronize()
        began = time.perf_counter()
        for path, pairs in chosen.items():
            self._layers[path].exchange(pairs)
        self._device.synchronize()
        count = sum(map(len, chosen.values()))
        self.counts.exchanged(count, time.perf_counter() - began)
        self.exchanged += count
        self._write()

    def _worth(self) -> list[tuple[float, str, int, int | None]]:
        """Exchanges that are worth it, as tuples: in how many more steps the first expert was chosen than the second,
        the layer's path, the first expert, and the second, which has a slot (None: an empty slot). In each layer the
        most chosen expert is paired with the least chosen one in a slot, the next with the next, and so on. Experts
        that pass get no slot; one that has a slot leaves for any expert that was chosen."""
        found = []
        for scores, (path, layer) in zip(self.counts.scores, self._layers.items(), strict=True):
            held, passing = layer.residents.slots, layer.residents.passing
            counts = {each: float(scores[each]) if each >= passing else -1.0 for each in held}
            there = [*[None] * (layer.residents.count - len(held)), *sorted(held, key=counts.__getitem__)]
            absent = sorted(set(range(passing, layer.experts)) - set(held), key=scores.__getitem__, reverse=True)
            for expert, leaves in zip(absent, there, strict=False):
                more, less = float(scores[expert]), -1.0 if leaves is None else counts[leaves]
                if not more or (less >= 0 and not clearly(more, less)):
                    break
                found.append((more - max(less, 0.0), path, expert, leaves))
        return found
