"""Experts that pass through the device in captured steps of many requests (``offload.pass_experts``), whether the host
computes all others or only those without slots.

In such steps the host's reading of experts takes nearly all the time, and the link to the device is idle. So the first
experts of each layer, the same ones in each step, are computed by the device; the host computes others meanwhile, and
the device adds both. They are copied to slots (``passing_copies``), or read where they are (``passing_in_place``). How
many experts pass is what lets the link and the host end together (``passing_part``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from evener.contracts.declared import CallSite
from evener.contracts.device import Device
from evener.contracts.ops import Bucket, OpFunction, Static
from evener.contracts.weights import MoEWeights
from evener.layers.builder import Builder
from evener.resolution.resolver import Resolver
from evener_offload.captured_experts import CapturedExperts
from evener_offload.passing_copies import PassingCopies
from evener_offload.passing_in_place import PassingInPlace
from evener_offload.passing_part import OTHER, PassingPart, placed
from evener_offload.passing_slots import CopiedLayer, PassingLayer, PassingSlots
from evener_offload.placed_layers import Biases
from evener_offload.second_layout import Stacks

#: Why nothing passes in place.
NO_READER = "the device does not read page-locked memory where it is"
#: What the manifest says if nothing passes; the reason follows.
NONE_PASS = "no experts in host memory pass through the device in decode steps"
#: What starts a captured step of one layer. It takes rows, ids, their weights, the layer's weights, and a function that
#: returns those for the host, with a map that leaves out so many of the first experts. It returns what
#: ``CapturedExperts.start`` does, or None if none passes.
Start = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, MoEWeights, Callable[[int], MoEWeights]],
    Callable[[], torch.Tensor] | None,
]


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
        in_place: whether the device reads passing experts where they are.

    Attributes:
        part: decides how many pass.
        layer: by path.
    """

    def __init__(
        self, *, sites: Sequence[CallSite], found: Mapping[str, Stacks], biases: Mapping[str, Biases], own: Builder,
        resolver: Resolver, device: Device, stream: Any, captured: CapturedExperts, host: Device, threads: int,
        percent: int | None, least: int, most: int, running: Callable[[], bool], residents: int = 0,
        in_place: bool = False,
    ) -> None:  # fmt: skip
        self._device, self._resolver, self._captured = device, resolver, captured
        self._least, self._most, self._biases = least, most, biases
        #: Whether there are steps in which experts pass.
        self._any = least <= most
        packings, layers = resolver.packings_by_layout, sum(site.op == "moe_block" for site in own.sites)
        # The link rests while the device does other work, unless it copies ahead.
        other = 0.0 if in_place else OTHER * layers / len(sites)
        self.part = PassingPart(device, stream, host, threads, percent, other)
        self._copies: PassingCopies | None = None
        self.layer: Mapping[str, PassingLayer]
        if in_place:
            where: PassingInPlace | PassingSlots = PassingInPlace(sites, found, own, packings, device, residents)
        else:
            where = PassingSlots(sites, found, own, packings, device, percent, residents)
            self._copies = PassingCopies(where, self.part, own, device, stream, running)
        self.layer, self._where = where.layer, str(where)
        #: By layer and how many of its experts pass: the layer's weights, and these for the device.
        self._weights: dict[tuple[int, int], tuple[MoEWeights, MoEWeights]] = {}

    def __str__(self) -> str:
        percent = self.part.percent
        part = "measured costs decide how many" if percent is None else f"{percent}%"
        return (f"experts in host memory pass through the device in captured steps of {self._least} rows or more: "
                f"{part}, {self._where}")  # fmt: skip

    def most(self, path: str) -> int:
        """How many experts of a layer pass in some step, as far as that is known."""
        return self.part.most(self.layer[path]) if self._any else 0

    def resolve(
        self, path: str, static: Static, bucket: Bucket, on_host: Callable[[], OpFunction], host_bytes: int
    ) -> Start | None:
        """What starts a captured step of one layer. None: no step of the bucket is captured with passing experts.

        Args:
            on_host: resolves ``routed_experts`` on the host, for these steps alone.
            host_bytes: of an expert as the host reads it.
        """
        if not self._any or bucket.high < self._least or bucket.low > self._most:
            return None
        layer, compute, copies = self.layer[path], on_host(), self._copies
        inner = {**static, "gate_up": layer.stacks[0].weight, "down": layer.stacks[1].weight, "placement": None}
        products = self._resolver.resolve("routed_experts", f"{path} passing", inner, bucket, {})

        def start(
            x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w: MoEWeights,
            for_host: Callable[[int], MoEWeights],
        ) -> Callable[[], torch.Tensor] | None:  # fmt: skip
            def link(ids: torch.Tensor) -> None:
                if isinstance(layer, CopiedLayer):
                    layer.copy(layer.count)
                else:
                    products(x, ids, weights, self._on_device(layer, path, layer.count, w))

            if len(x) < self._least:
                return None
            count = self.part.settle(layer, bucket, compute, x, ids, for_host(0), link)
            if not count:
                return None
            if copies is not None and layer.number == 0:
                copies.begin(bucket)
            w_device, passed = self._on_device(layer, path, count, w), count * layer.nbytes if copies else 0
            wait = self._captured.start(path, compute, host_bytes, x, ids, weights, for_host(count), passed)

            def finish() -> torch.Tensor:
                if copies is not None:
                    copies.wait(layer.number)
                y: torch.Tensor = products(x, ids, weights, w_device)
                if copies is not None:
                    copies.follow(layer.number, bucket)
                return y.add_(wait())

            return finish

        return start

    def _on_device(self, layer: PassingLayer, path: str, count: int, w: MoEWeights) -> MoEWeights:
        """The weights for the device, with the layer's first experts alone."""
        known = self._weights.get((layer.number, count))
        if known is None or known[0] is not w:
            slots, copies = (self._device.upload(each.numpy()) for each in placed(layer.experts, 0, count))
            found = self._biases[path].on_device(w) if path in self._biases else w
            gate_up_bias, down_bias = (
                None if bias is None else bias[: layer.count] for bias in (found.gate_up_bias, found.down_bias)
            )
            found = found._replace(
                gate_up=layer.stacks[0].value, down=layer.stacks[1].value, slots=slots, copies=copies,
                gate_up_bias=gate_up_bias, down_bias=down_bias,
            )  # fmt: skip
            known = self._weights[layer.number, count] = w, found
        return known[1]
