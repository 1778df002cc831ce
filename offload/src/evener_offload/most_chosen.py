"""Lets the experts pass through the device that tokens choose most (``choice_counts``). Then most of the copied experts
are needed, and the host reads fewer. Experts that pass have a stage in page-locked memory (``passing_stage``), because
captured copies read the same addresses in each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from evener.contracts.device import Device
from evener.layers.builder import Builder
from evener_offload.choice_counts import ChoiceCounts, clearly
from evener_offload.passing_places import PassingPlaces
from evener_offload.passing_slots import PassingLayer
from evener_offload.passing_stage import PassingStage


class MostChosen:
    """Exchanges experts that pass for experts that are chosen more.

    Args:
        own: makes the stages after experts are loaded. Stages must not be made in a step: to lock pages waits for the
            device, which may wait for the host.
        layers, places: of each layer, by number.
        most: the largest number of a layer's experts that pass in some step, as far as that is known.

    Attributes:
        exchanged: how many experts have taken the place of one that passed.
        counts: in how many steps each expert was chosen.
    """

    def __init__(
        self, device: Device, own: Builder, layers: Sequence[PassingLayer], places: Sequence[PassingPlaces],
        most: Callable[[PassingLayer], int],
    ) -> None:  # fmt: skip
        self._device, self._layers, self._places, self._most, self.exchanged = device, layers, places, most, 0
        self.counts = ChoiceCounts(device, len(layers), max(layer.experts for layer in layers))
        own.table(("stages of passing experts",), 0, self._make)

    def _make(self, where: torch.device) -> torch.Tensor:
        """Make the stages, and put the experts that pass on them. Takes no device memory: returns an empty table."""
        for layer, places in zip(self._layers, self._places, strict=True):
            layer.stages = [PassingStage(each, layer.first, layer.count, self._device) for each in layer.slots]
            for place in np.flatnonzero(places.expert_at[: layer.count] != np.arange(layer.count)).tolist():
                self._put(layer, places, place)
        return torch.empty(0, device=where)

    @staticmethod
    def _put(layer: PassingLayer, places: PassingPlaces, place: int) -> None:
        for stage in layer.stages:
            stage.put(int(places.expert_at[place]), place)

    def note(self, layer: PassingLayer, ids: torch.Tensor) -> None:
        """Submit that the step chose these experts of the layer, int32 [T, k]."""
        self.counts.note(layer.number, ids)

    def replayed(self) -> None:
        """To be called before a replay is submitted. Exchanges experts when there are new counts."""
        if self.counts.replayed():
            self.review()

    def review(self) -> None:
        """Let the most chosen experts take the places of the least chosen ones that pass. ``ChoiceCounts.most`` limits
        how many."""
        chosen = sorted(self._worth(), reverse=True)[: self.counts.most()]
        if not chosen:
            return
        self._device.synchronize()
        began = time.perf_counter()
        for _, number, come, go in chosen:
            layer, places = self._layers[number], self._places[number]
            places.exchange(come, go)
            for place in (come, go):
                if place < layer.count:
                    self._put(layer, places, place)
        for number in {number for _, number, _, _ in chosen}:
            self._places[number].write()
        self._device.synchronize()
        self.counts.exchanged(len(chosen), time.perf_counter() - began)
        self.exchanged += len(chosen)

    def _worth(self) -> list[tuple[float, int, int, int]]:
        """Exchanges that are worth it, as tuples: in how many more steps the first expert was chosen than the second,
        which passes; the layer's number; and the places of both. In each layer the most chosen expert is paired with
        the least chosen one that passes, the next with the next, and so on."""
        found = []
        for layer, places, scores in zip(self._layers, self._places, self.counts.scores, strict=True):
            passing, by_place = self._most(layer), scores[places.expert_at]
            others = passing + np.argsort(-by_place[passing:], kind="stable")
            for come, go in zip(others, np.argsort(by_place[:passing], kind="stable"), strict=False):
                more, less = float(by_place[come]), float(by_place[go])
                if not clearly(more, less):
                    break
                found.append((more - less, layer.number, int(come), int(go)))
        return found
