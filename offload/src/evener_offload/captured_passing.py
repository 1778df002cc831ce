"""Experts that pass through the device in captured steps of many requests (``offload.pass_experts``): in host layers,
and in layers with slots.

In such steps nearly all the time is the host's reading of experts, and the link to the device is idle. So a part of
each layer's experts is copied to slots (``passing_copies``) and computed by the device. Meanwhile the host computes
other experts; the device adds both results. The experts that pass are the first ones of a layer, or the most chosen
ones (``most_chosen``). ``passing_part`` decides how many pass, so that the host and the link end at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from evener.contracts.declared import CallSite
from evener.contracts.device import Device
from evener.contracts.ops import Bucket, OpFunction, Static
from evener.contracts.weights import MoEWeights
from evener.layers.builder import Builder
from evener.resolution.resolver import Resolver
from evener_offload.captured_experts import CapturedExperts
from evener_offload.most_chosen import MostChosen
from evener_offload.passing_copies import PassingCopies
from evener_offload.passing_part import OTHER, PassingPart
from evener_offload.passing_places import PassingPlaces
from evener_offload.passing_slots import PassingLayer, PassingSlots
from evener_offload.placed_layers import Biases
from evener_offload.second_layout import Stacks

#: What the manifest says if no experts pass; the reason follows.
NONE_PASS = "no experts in host memory pass through the device in decode steps"
#: Takes how many experts pass; returns a layer's weights for the host, with a map that leaves these experts out.
ForHost = Callable[[int], MoEWeights]
#: A layer's rows [T, hidden], and their expert ids, int32, and weights, float32, [T, k].
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
#: Lets the device wait for the result of a layer, and returns it: [T, hidden].
Finish = Callable[[], torch.Tensor]
#: Starts a captured step of one layer. Takes the inputs, the layer's weights, and the weights for the host. Returns
#: what ``CapturedExperts.start`` returns, or None if no expert passes.
Start = Callable[[Inputs, MoEWeights, ForHost], Finish | None]


class CapturedPassing:
    """Submits the work of layers in which experts pass.

    Args:
        sites: call sites of these layers.
        found: by path: the experts as the device reads them.
        biases: by path: biases on the device, for layers whose weights have the biases in host memory.
        own: gets the slots.
        resolver: the device's.
        stream: for the copies; None: the device has only one queue, and nothing runs beside the copies.
        captured: submits the host's part.
        host: the device that computes experts on the host, with so many ``threads``.
        percent: see ``parse_part``; not 0.
        least, most: rows of the smallest step in which experts pass, and of the largest captured step.
        running: whether the step being submitted is captured, now or on its next run.
        residents: how many experts of each layer have slots of their own.
        free: bytes of host memory for stages of the most chosen experts. If too few, the first experts pass.

    Attributes:
        part: decides how many experts pass.
        layer, places: by path.
        most_chosen: decides which experts pass; None: the first ones.
    """

    def __init__(
        self, *, sites: Sequence[CallSite], found: Mapping[str, Stacks], biases: Mapping[str, Biases], own: Builder,
        resolver: Resolver, device: Device, stream: Any, captured: CapturedExperts, host: Device, threads: int,
        percent: int | None, least: int, most: int, running: Callable[[], bool], residents: int = 0,
        free: int = 0,
    ) -> None:  # fmt: skip
        self._device, self._resolver, self._captured = device, resolver, captured
        self._least, self._most, self._biases = least, most, biases
        #: Whether there are steps in which experts pass.
        self._any = least <= most
        packings, layers = resolver.packings_by_layout, sum(site.op == "moe_block" for site in own.sites)
        slots = PassingSlots(sites, found, own, packings, device, percent, residents)
        self.layer: Mapping[str, PassingLayer] = slots.layer
        self.places = {path: PassingPlaces(device, layer) for path, layer in slots.layer.items()}
        chosen = sum(layer.stage_bytes for layer in slots.order) <= free
        self.part = PassingPart(device, stream, host, threads, percent, OTHER * layers / len(sites), chosen)
        self.most_chosen = (
            MostChosen(device, own, slots.order, list(self.places.values()), self.part.most) if chosen else None
        )
        self._copies = PassingCopies(slots, self.part, own, device, stream, running)
        self._where = f"in {slots.sets} sets of slots, {'the most chosen' if chosen else 'the first'} ones"
        #: By layer and how many of its experts pass: the layer's weights, and the same for the device.
        self._weights: dict[tuple[int, int], tuple[MoEWeights, MoEWeights]] = {}

    def __str__(self) -> str:
        percent = self.part.percent
        part = "measured costs decide how many" if percent is None else f"{percent}%"
        return (f"experts in host memory pass through the device in captured steps of {self._least} rows or more: "
                f"{part}, {self._where}")  # fmt: skip

    def most(self, path: str) -> int:
        """The largest number of a layer's experts that pass in some step, as far as that is known now."""
        return self.part.most(self.layer[path]) if self._any else 0

    def resolve(
        self, path: str, static: Static, bucket: Bucket, on_host: Callable[[], OpFunction], host_bytes: int
    ) -> Start | None:
        """The function that starts a captured step of one layer. None: experts pass in no step of the bucket.

        Args:
            on_host: resolves ``routed_experts`` on the host, for these steps alone.
            host_bytes: bytes of an expert as the host reads it.
        """
        if not self._any or bucket.high < self._least or bucket.low > self._most:
            return None
        layer, compute = self.layer[path], on_host()
        gate_up, down = (each.weight for each in layer.slots)
        inner = {**static, "gate_up": gate_up, "down": down, "placement": None}
        products = self._resolver.resolve("routed_experts", f"{path} passing", inner, bucket, {})
        step = _Layer(path, layer, bucket, compute, host_bytes, products)

        def start(inputs: Inputs, w: MoEWeights, for_host: ForHost) -> Finish | None:
            return None if len(inputs[0]) < self._least else self._start(step, inputs, w, for_host)

        return start

    @property
    def exchanged(self) -> int:
        """How many experts have taken another one's place among those that pass."""
        return 0 if self.most_chosen is None else self.most_chosen.exchanged

    def replayed(self) -> None:
        """A captured step is submitted next."""
        if self.most_chosen is not None and self._any:
            self.most_chosen.replayed()

    def _start(self, step: _Layer, inputs: Inputs, w: MoEWeights, for_host: ForHost) -> Finish | None:
        layer, copies, chosen = step.layer, self._copies, self.most_chosen
        if chosen is not None:
            chosen.counts.prepare()
        count = self.part.settle(
            layer, step.bucket, step.compute, inputs, for_host(0), partial(layer.copy, layer.count)
        )
        if not count:
            return None
        if layer.number == 0:
            copies.begin(step.bucket)
        there = self._on_device(step, count, w)
        wait = self._captured.start(
            step.path, step.compute, step.host_bytes, *inputs, for_host(count), count * layer.nbytes
        )
        if chosen is not None:
            chosen.note(layer, inputs[1])

        def finish() -> torch.Tensor:
            copies.wait(layer.number)
            y: torch.Tensor = step.products(*inputs, there)
            copies.follow(layer.number, step.bucket)
            return y.add_(wait())

        return finish

    def _on_device(self, step: _Layer, count: int, w: MoEWeights) -> MoEWeights:
        """The weights for the device, with a map of only the experts in the first ``count`` places."""
        key, places, layer = (step.layer.number, count), self.places[step.path], step.layer
        known = self._weights.get(key)
        if known is None or known[0] is not w:
            slots, copies = places.on_device(count)
            gate_up, down = (each.value for each in layer.slots)
            made = w._replace(gate_up=gate_up, down=down, slots=slots, copies=copies)
            known = self._weights[key] = w, made
        if w.gate_up_bias is None and w.down_bias is None:
            return known[1]
        found = self._biases[step.path].on_device(w) if step.path in self._biases else w
        gate_up_bias, down_bias = (self._of_places(step, bias) for bias in (found.gate_up_bias, found.down_bias))
        return known[1]._replace(gate_up_bias=gate_up_bias, down_bias=down_bias)

    def _of_places(self, step: _Layer, bias: torch.Tensor | None) -> torch.Tensor | None:
        """The biases of the experts in slots. If the most chosen experts pass, these change between steps."""
        if bias is None or self.most_chosen is None:
            return None if bias is None else bias[: step.layer.count]
        return bias.index_select(0, self.places[step.path].experts)


@dataclass(frozen=True)
class _Layer:
    """A layer at a bucket.

    Attributes:
        compute: ``routed_experts`` on the host.
        host_bytes: bytes of an expert as the host reads it.
        products: ``routed_experts`` on the device, with the slots.
    """

    path: str
    layer: PassingLayer
    bucket: Bucket
    compute: OpFunction
    host_bytes: int
    products: OpFunction
