"""Experts that pass through the device in captured steps of many requests (``offload.pass_experts``), whether the host
computes all others or only those without slots.

In such steps the host's reading of experts takes nearly all the time, and the link to the device is idle. So the first
experts of each layer, the same ones in each step, are copied to slots on the device and computed there; the host
computes others meanwhile, and the device adds both. Copies are part of the capture, on a stream of their own that
branches off where the step begins: the host submits nothing more, and waits for nothing more.

There are a few sets of slots, which layers use in turn (``passing_slots``): a set is filled again as soon as the
products with it are done, so that the link goes on while the host computes, and while layers on the device run. How
many experts pass is what lets the link and the host end together (``passing_part``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from evener.contracts.declared import CallSite
from evener.contracts.device import Device
from evener.contracts.ops import Bucket, OpFunction, Static
from evener.contracts.weights import MoEWeights
from evener.layers.builder import Builder
from evener.resolution.resolver import Resolver
from evener_offload.captured_experts import CapturedExperts
from evener_offload.passing_part import OTHER, PassingPart, placed
from evener_offload.passing_slots import PassingLayer, PassingSlots
from evener_offload.placed_layers import Biases
from evener_offload.second_layout import Stacks

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

    Attributes:
        part: decides how many pass.
    """

    def __init__(
        self, *, sites: Sequence[CallSite], found: Mapping[str, Stacks], biases: Mapping[str, Biases], own: Builder,
        resolver: Resolver, device: Device, stream: Any, captured: CapturedExperts, host: Device, threads: int,
        percent: int | None, least: int, most: int, running: Callable[[], bool], residents: int = 0,
    ) -> None:  # fmt: skip
        self._device, self._resolver, self._stream, self._captured = device, resolver, stream, captured
        self._least, self._most, self._biases, self._running = least, most, biases, running
        #: Whether there are steps in which experts pass.
        self._any = least <= most
        packings = resolver.packings_by_layout
        self._slots = PassingSlots(sites, found, own, packings, device, percent, residents)
        layers = sum(site.op == "moe_block" for site in own.sites)
        self.part = PassingPart(device, stream, host, threads, percent, OTHER * layers / len(sites))
        #: By layer and how many of its experts pass: the layer's weights, and these for the device.
        self._weights: dict[tuple[int, int], tuple[MoEWeights, MoEWeights]] = {}
        #: The embedding, where steps begin, until it notes that.
        self._first = next((site for site in own.sites if site.op == "embedding"), None)
        #: Events: where the step that is submitted began, and after the copies of each layer.
        self._begun: Any = None
        self._copied: list[Any] = [None] * len(sites)

    def __str__(self) -> str:
        percent = self.part.percent
        part = "measured costs decide how many" if percent is None else f"{percent}%"
        return (f"experts in host memory pass through the device in captured steps of {self._least} rows or more: "
                f"{part}, in {self._slots.sets} sets of slots")  # fmt: skip

    def most(self, path: str) -> int:
        """How many experts of a layer pass in some step, as far as that is known."""
        return self.part.most(self._slots.layer[path]) if self._any else 0

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
        layer, compute = self._slots.layer[path], on_host()
        inner = {**static, "gate_up": layer.slots[0].weight, "down": layer.slots[1].weight, "placement": None}
        products = self._resolver.resolve("routed_experts", f"{path} passing", inner, bucket, {})

        def start(
            x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w: MoEWeights,
            for_host: Callable[[int], MoEWeights],
        ) -> Callable[[], torch.Tensor] | None:  # fmt: skip
            if len(x) < self._least or not (count := self.part.settle(layer, bucket, compute, x, ids, for_host(0))):
                return None
            if layer.number == 0:
                self._begin(bucket)
            w_device, passed = self._on_device(layer, path, count, w), count * layer.nbytes
            wait = self._captured.start(path, compute, host_bytes, x, ids, weights, for_host(count), passed)

            def finish() -> torch.Tensor:
                if (copied := self._copied[layer.number]) is not None:
                    copied.wait()
                y: torch.Tensor = products(x, ids, weights, w_device)
                if layer.number + self._slots.sets < len(self._slots.order):
                    self._copy(layer.number + self._slots.sets, bucket, self._event())
                return y.add_(wait())

            return finish

        return start

    def _begin(self, bucket: Bucket) -> None:
        """Submit the first copies. They wait for the beginning of the step, not for the layers before."""
        begun, self._begun = self._begun or self._event(), None
        for number in range(self._slots.sets):
            self._copy(number, bucket, begun)
        if self._first is not None:
            self._first.table = tuple(map(self._noting, self._first.table))
            self._first = None

    def _copy(self, number: int, bucket: Bucket, after: Any) -> None:
        """Submit the copies of a layer, which wait for an event."""
        layer = self._slots.order[number]
        if after is not None:
            after.wait(self._stream)
        with self._stream or nullcontext():
            layer.copy(self.part.count(layer, bucket))
            self._copied[number] = self._event()

    def _event(self) -> Any:
        """An event after what was submitted to the current stream; None if the device has one queue."""
        if self._stream is None:
            return None
        event = self._device.new_event()
        event.record()
        return event

    def _noting(self, embed: OpFunction) -> OpFunction:
        """The embedding; it notes that a captured step begins, before it is submitted."""

        def run(*inputs: Any) -> Any:
            self._begun = self._event() if self._running() else None
            return embed(*inputs)

        return run

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
                gate_up=layer.slots[0].value, down=layer.slots[1].value, slots=slots, copies=copies,
                gate_up_bias=gate_up_bias, down_bias=down_bias,
            )  # fmt: skip
            known = self._weights[layer.number, count] = w, found
        return known[1]
