"""Experts that pass through the device in captured steps of many requests (``offload.pass_experts``), whether the host
computes all others or only those without slots.

In such steps the host's reading of experts takes nearly all the time, and the link to the device is idle. So a part of
each layer's experts is computed by the device; the host computes others meanwhile, and the device adds both. They are
copied to slots: the first ones, the same in each step, ahead (``passing_copies``), or those that tokens have chosen
(``passing_chosen``). How many pass is what lets the host and the link end together (``passing_part``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evener.contracts.declared import CallSite
from evener.contracts.device import Device
from evener.contracts.ops import Bucket, OpFunction, Static
from evener.contracts.weights import MoEWeights
from evener.layers.builder import Builder
from evener.resolution.resolver import Resolver
from evener_offload.captured_experts import CapturedExperts
from evener_offload.passing_chosen import Chosen, PassingChosen
from evener_offload.passing_copies import PassingCopies
from evener_offload.passing_part import OTHER, PassingPart, placed
from evener_offload.passing_slots import PassingLayer, PassingSlots
from evener_offload.placed_layers import Biases
from evener_offload.second_layout import Stacks

#: Why nothing passes in place.
NO_READER = "the device does not read page-locked memory where it is"
#: What the manifest says if nothing passes; the reason follows.
NONE_PASS = "no experts in host memory pass through the device in decode steps"
#: Returns a layer's weights for the host, with a map that leaves out so many of the first experts; of None: with one
#: expert more, which has no place, and stands for all that pass.
ForHost = Callable[[int | None], MoEWeights]
#: Rows of a layer's step, expert ids and their weights.
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
#: Makes the device wait for the result of a layer.
Finish = Callable[[], torch.Tensor]
#: What starts a captured step of one layer. It takes its inputs, the layer's weights, those for the host, and where
#: experts with slots of their own are (int32 [experts, 1]; None: there are none). It returns what
#: ``CapturedExperts.start`` does, or None if none passes.
Start = Callable[[Inputs, MoEWeights, ForHost, torch.Tensor | None], Finish | None]


class CapturedPassing:
    """Submits the work of layers of which a part passes.

    Args:
        sites: of these layers.
        found: by path: experts as the device reads them.
        biases: by path: their biases on the device, where the layer's weights have them in host memory.
        own: gets the slots.
        resolver: the device's.
        stream: of the copies; None: the device has one queue, and nothing runs beside them.
        captured: submits the host's part.
        host: the device that computes experts there, with so many ``threads``.
        percent: as of ``parse_part``; not 0.
        least, most: rows of the smallest and the largest captured step.
        running: whether a step is submitted that is captured, now or next.
        residents: how many experts of each layer have slots of their own.
        chosen: whether only chosen experts pass.

    Attributes:
        part: decides how many pass.
        layer: by path.
    """

    def __init__(
        self, *, sites: Sequence[CallSite], found: Mapping[str, Stacks], biases: Mapping[str, Biases], own: Builder,
        resolver: Resolver, device: Device, stream: Any, captured: CapturedExperts, host: Device, threads: int,
        percent: int | None, least: int, most: int, running: Callable[[], bool], residents: int = 0,
        chosen: bool = False,
    ) -> None:  # fmt: skip
        self._device, self._resolver, self._captured = device, resolver, captured
        self._least, self._most, self._biases = least, most, biases
        #: Whether there are steps in which experts pass.
        self._any = least <= most
        #: Experts that stand for those that pass.
        self._spare = int(chosen)
        packings, layers = resolver.packings_by_layout, sum(site.op == "moe_block" for site in own.sites)
        # The link rests while the device does other work, unless it copies ahead.
        other = 0.0 if chosen else OTHER * layers / len(sites)
        self.part = PassingPart(device, stream, host, threads, percent, other, self._spare)
        slots = PassingSlots(sites, found, own, packings, device, percent, residents, chosen)
        self.layer: Mapping[str, PassingLayer] = slots.layer
        self._chosen = PassingChosen(device, stream) if chosen else None
        self._copies = None if chosen else PassingCopies(slots, self.part, own, device, stream, running)
        self._where = "of those that are chosen" if chosen else f"in {slots.sets} sets of slots"
        #: By layer and how many of its experts pass: the layer's weights, and these for the device.
        self._weights: dict[tuple[int, int], tuple[MoEWeights, MoEWeights]] = {}

    def __str__(self) -> str:
        percent = self.part.percent
        part = "measured costs decide how many" if percent is None else f"{percent}%"
        return (f"experts in host memory pass through the device in captured steps of {self._least} rows or more: "
                f"{part}, {self._where}")  # fmt: skip

    def most(self, path: str) -> int:
        """How many of the first experts of a layer pass in some step, as far as that is known."""
        return self.part.most(self.layer[path]) if self._any and self._chosen is None else 0

    def resolve(
        self, path: str, static: Static, bucket: Bucket, on_host: Callable[[int], OpFunction], host_bytes: int
    ) -> Start | None:
        """What starts a captured step of one layer. None: no step of the bucket is captured with passing experts.

        Args:
            on_host: resolves ``routed_experts`` on the host, for these steps alone, with so many experts more.
            host_bytes: of an expert as the host reads it.
        """
        if not self._any or bucket.high < self._least or bucket.low > self._most:
            return None
        layer, compute = self.layer[path], on_host(self._spare)
        gate_up, down = (each.weight for each in layer.slots)
        inner = {**static, "gate_up": gate_up, "down": down, "placement": None}
        products = self._resolver.resolve("routed_experts", f"{path} passing", inner, bucket, {})
        step = _Layer(path, layer, bucket, compute, host_bytes, products)

        def start(inputs: Inputs, w: MoEWeights, for_host: ForHost, held: torch.Tensor | None) -> Finish | None:
            if len(inputs[0]) < self._least:
                return None
            if self._chosen is not None:
                return self._start_chosen(step, self._chosen, inputs, w, for_host, held)
            return self._start_first(step, inputs, w, for_host)

        return start

    def _start_first(self, step: _Layer, inputs: Inputs, w: MoEWeights, for_host: ForHost) -> Finish | None:
        """Start a step in which the layer's first experts pass."""
        layer, copies = step.layer, self._copies
        assert copies is not None, "experts pass that are copied ahead"
        count = self.part.settle(
            layer, step.bucket, step.compute, inputs, for_host(0), lambda ids: layer.copy(layer.count)
        )
        if not count:
            return None
        if layer.number == 0:
            copies.begin(step.bucket)
        there = self._first_on_device(step, count, w)
        wait = self._captured.start(
            step.path, step.compute, step.host_bytes, *inputs, for_host(count), count * layer.nbytes
        )

        def finish() -> torch.Tensor:
            copies.wait(layer.number)
            y: torch.Tensor = step.products(*inputs, there)
            copies.follow(layer.number, step.bucket)
            return y.add_(wait())

        return finish

    def _start_chosen(
        self, step: _Layer, passing: PassingChosen, inputs: Inputs, w: MoEWeights, for_host: ForHost,
        held: torch.Tensor | None,
    ) -> Finish | None:  # fmt: skip
        """Start a step in which a part of the chosen experts passes."""
        layer, (x, ids, weights) = step.layer, inputs
        if not passing.copies(layer):
            return None

        def pass_all(ids: torch.Tensor) -> None:
            chosen = passing.split(layer, ids, None, 1.0)
            passing.copy(layer, chosen)()
            step.products(x, ids, weights, self._chosen_on_device(step, chosen, w))

        spare = for_host(None)
        if not self.part.settle(layer, step.bucket, step.compute, inputs, spare, pass_all):
            return None
        chosen = passing.split(layer, ids, held, self.part.of_absent(layer, step.bucket))
        wait = self._captured.start(step.path, step.compute, step.host_bytes, x, chosen.ids, weights, spare)
        copied = passing.copy(layer, chosen)

        def finish() -> torch.Tensor:
            copied()
            y: torch.Tensor = step.products(x, ids, weights, self._chosen_on_device(step, chosen, w))
            return y.add_(wait())

        return finish

    def _first_on_device(self, step: _Layer, count: int, w: MoEWeights) -> MoEWeights:
        """The weights for the device, with the layer's first experts alone."""
        key = step.layer.number, count
        known = self._weights.get(key)
        if known is None or known[0] is not w:
            slots, copies = (self._device.upload(each.numpy()) for each in placed(step.layer.experts, 0, count))
            biases = (None if bias is None else bias[: step.layer.count] for bias in self._biases_of(step, w))
            known = self._weights[key] = w, _on_device(step, w, slots, copies, *biases)
        return known[1]

    def _chosen_on_device(self, step: _Layer, chosen: Chosen, w: MoEWeights) -> MoEWeights:
        """The weights for the device, with the chosen experts alone."""
        each = self._biases_of(step, w)
        biases = (None if bias is None else bias.index_select(0, chosen.experts) for bias in each)
        return _on_device(step, w, chosen.slots, chosen.copies, *biases)

    def _biases_of(self, step: _Layer, w: MoEWeights) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        found = self._biases[step.path].on_device(w) if step.path in self._biases else w
        return found.gate_up_bias, found.down_bias


@dataclass(frozen=True)
class _Layer:
    """A layer at a bucket: ``routed_experts`` on the host and with the slots, and bytes of an expert on the host."""

    path: str
    layer: PassingLayer
    bucket: Bucket
    compute: OpFunction
    host_bytes: int
    products: OpFunction


def _on_device(
    step: _Layer, w: MoEWeights, slots: torch.Tensor, copies: torch.Tensor, gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> MoEWeights:  # fmt: skip
    gate_up, down = (each.value for each in step.layer.slots)
    return w._replace(
        gate_up=gate_up, down=down, slots=slots, copies=copies, gate_up_bias=gate_up_bias, down_bias=down_bias
    )
