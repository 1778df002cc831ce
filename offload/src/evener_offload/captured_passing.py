"""Experts of host layers that pass through the device in captured steps of many requests (``offload.pass_experts``).

In such steps the host's reading of experts takes nearly all the time, and the link to the device is idle. So the first
experts of each host layer, the same ones in each step, are copied to slots on the device and computed there; the host
computes the others meanwhile, and the device adds both. Copies are part of the capture, on a stream of their own that
branches off where the step begins: the host submits nothing more, and waits for nothing more. They are large, as
neighbouring experts are one copy for each tensor of a stack.

There are ``SETS`` sets of slots, which layers use in turn, whatever their layouts: a set is filled again as soon as the
products with it are done, so that the link goes on while the host computes, and while layers on the device run.

Which part passes is what lets the link and the host end together (``part_for``). Copies do not depend on what tokens
choose; what the host reads does, so the host is timed with as many rows as the step has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from evener.contracts.declared import CallSite
from evener.contracts.device import Device
from evener.contracts.ops import Bucket, OpFunction, Static
from evener.contracts.quant import Packing
from evener.contracts.weights import MoEWeights
from evener.errors import ConfigError
from evener.layers.builder import Builder
from evener.resolution.resolver import Resolver
from evener_offload.captured_experts import SPARING, CapturedExperts
from evener_offload.expert_slots import ExpertSlots, Room, room_bytes
from evener_offload.placed_layers import Biases, stacks
from evener_offload.second_layout import Stacks, expert_bytes, kind_of

log = logging.getLogger("evener.worker")
#: Sets of slots. With two the link would be idle whenever the host is late; a third is also filled before the first
#: host layer is reached.
SETS = 3
#: Percent of experts that may pass: at most, and for which there are slots if measured costs decide. The host reads
#: memory at about 1.7 times the speed of the link. So both end together with 38% if tokens choose all experts, and with
#: fewer if they do not.
MOST, AUTO = 50, 40
#: Seconds of a step for each layer of the model in which the host does not compute experts: attention, products of the
#: device, and the call. An H200 took 7.6 ms beside the host's part for the 48 layers of Qwen3-30B-A3B.
OTHER = 1.6e-4
#: How often copies and the host are timed.
_TIMES = 3
#: How much longer than the host alone the copies take that it is timed beside.
_LONGER = 1.5


def parse_part(value: str) -> int | None:
    """What ``offload.pass_experts`` says: percent of a layer's experts; None: measured costs decide; 0: none pass.

    Raises:
        ConfigError: it is something else.
    """
    if value in ("auto", "off"):
        return None if value == "auto" else 0
    if not (value.isascii() and value.isdecimal()) or not 0 < int(value) <= MOST:
        raise ConfigError(f"offload.pass_experts={value!r}: set off, auto, or the percent of a layer's experts, from 1 "
                          f"to {MOST}")  # fmt: skip
    return int(value)


def part_for(copying: float, host: float, other: float) -> float:
    """The part of the experts that pass so that the host and the link are done at the same time: with the part X, the
    host takes ``host * (1 - X) + other``, and the link ``copying * X``.

    Args:
        copying, host: seconds for all experts of a layer, of which the host reads those that are chosen.
        other: seconds of a step in which the host does not compute, for each host layer.
    """
    return (host + other) / (copying + host)


def slots_of(experts: int, percent: int | None) -> int:
    """Slots of a set for a layer with so many experts."""
    return max(1, round(experts * (AUTO if percent is None else percent) / 100))


@dataclass
class _Layer:
    """A host layer.

    Attributes:
        number: in the order in which a step reaches the layers.
        slots: of gate and up, and of down.
        first: number of its first expert in them.
        experts, count: how many it has, and how many have slots.
        nbytes: of an expert, as the device reads it.
    """

    number: int
    slots: tuple[ExpertSlots, ExpertSlots]
    first: int
    experts: int
    count: int
    nbytes: int

    def copy(self, count: int) -> None:
        """Start copying the first experts to the slots, on the current stream."""
        for each in self.slots:
            each.copy(self.first, 0, count)


class CapturedPassing:
    """Submits the work of host layers of which a part passes.

    Args:
        sites: of the host layers.
        found, biases: by path: experts as the device reads them, and their biases on it.
        own: gets the slots.
        resolver: the device's.
        stream: of the copies; None: the device has one queue, and nothing runs beside them.
        captured: submits the host's part.
        host: the device that computes experts there, with so many ``threads``.
        percent: as of ``parse_part``; not 0.
        least, most: rows of the smallest and the largest captured step.
        running: whether a step is submitted that is captured, now or next.
    """

    def __init__(
        self, *, sites: Sequence[CallSite], found: Mapping[str, Stacks], biases: Mapping[str, Biases], own: Builder,
        resolver: Resolver, device: Device, stream: Any, captured: CapturedExperts, host: Device, threads: int,
        percent: int | None, least: int, most: int, running: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._device, self._resolver, self._stream, self._captured = device, resolver, stream, captured
        self._host, self._threads, self._percent, self._running = host, threads, percent, running
        self._least, self._most, self._biases = least, most, biases
        self._layers = self._with_slots(sites, found, own, resolver.packings_by_layout)
        self._order = list(self._layers.values())
        layers = sum(site.op == "moe_block" for site in own.sites)
        self._other = OTHER * layers / len(sites)
        #: By the largest number of rows of a bucket: the part that passes. Kernels of the host know the weights of
        #: their last call, so a bucket has one part.
        self._parts: dict[int, float] = {}
        #: By layer and how many of its experts pass: the layer's weights, and these for the host and for the device.
        self._weights: dict[tuple[int, int], tuple[MoEWeights, MoEWeights, MoEWeights]] = {}
        #: The embedding, where steps begin, until it notes that.
        self._first = next((site for site in own.sites if site.op == "embedding"), None)
        #: Events: where the step that is submitted began, and after the copies of each layer.
        self._begun: Any = None
        self._copied: list[Any] = [None] * len(sites)

    def __str__(self) -> str:
        part = "measured costs decide how many" if self._percent is None else f"{self._percent}%"
        return (f"experts of host layers pass through the device in captured steps of {self._least} rows or more: "
                f"{part}, in {min(SETS, len(self._order))} sets of slots")  # fmt: skip

    @staticmethod
    def room(sites: Sequence[CallSite], packings: Mapping[str, Packing], percent: int | None, alignment: int) -> int:
        """Bytes of the slots that layers may need, which have their layouts of the device's ``packings``."""
        counts = [slots_of(site.static["experts"], percent) for site in sites]
        each = (n * expert_bytes(stacks(site), packings) for n, site in zip(counts, sites, strict=True))
        return min(SETS, len(sites)) * room_bytes(max(each), max(counts), alignment) if sites else 0

    def _with_slots(
        self, sites: Sequence[CallSite], found: Mapping[str, Stacks], own: Builder, packings: Mapping[str, Packing]
    ) -> dict[str, _Layer]:
        layers, alignment = dict[str, _Layer](), self._device.capabilities.alignment
        for which in range(min(SETS, len(sites))):
            kinds: dict[Any, list[tuple[int, CallSite]]] = {}
            for number in range(which, len(sites), SETS):
                kinds.setdefault(kind_of(found[sites[number].path]), []).append((number, sites[number]))
            bytes_of = {kind: expert_bytes(found[group[0][1].path], packings) for kind, group in kinds.items()}
            counts = {kind: slots_of(group[0][1].static["experts"], self._percent) for kind, group in kinds.items()}
            most = max(counts[kind] * bytes_of[kind] for kind in kinds)
            room = Room(own, f"passing experts {which}", most, max(counts.values()), alignment)
            for kind, group in kinds.items():
                gate_up, down = (
                    ExpertSlots(own, each, packings[each[0].layout], counts[kind], self._device, room)
                    for each in zip(*(found[site.path] for _, site in group), strict=True)
                )
                room.hold((gate_up, down))
                for place, (number, site) in enumerate(group):
                    experts = site.static["experts"]
                    layers[site.path] = _Layer(
                        number, (gate_up, down), place * experts, experts, counts[kind], bytes_of[kind]
                    )  # fmt: skip
        return dict(sorted(layers.items(), key=lambda each: each[1].number))

    def resolve(
        self, path: str, static: Static, bucket: Bucket, on_host: Callable[[], OpFunction], host_bytes: int
    ) -> Callable[..., Callable[[], torch.Tensor] | None] | None:
        """What starts a captured step of one layer as ``CapturedExperts.start`` does; it returns None if no expert
        passes in steps of so many rows. None: no step of the bucket is captured with passing experts.

        Args:
            on_host: resolves ``routed_experts`` on the host, for these steps alone.
            host_bytes: of an expert as the host reads it.
        """
        if bucket.high < self._least or bucket.low > self._most:
            return None
        layer, compute = self._layers[path], on_host()
        inner = {**static, "gate_up": layer.slots[0].weight, "down": layer.slots[1].weight, "placement": None}
        products = self._resolver.resolve("routed_experts", f"{path} passing", inner, bucket, {})

        def start(
            x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w: MoEWeights
        ) -> Callable[[], torch.Tensor] | None:
            if len(x) < self._least or not (count := self._count(layer, bucket, compute, x, ids, w)):
                return None
            if layer.number == 0:
                self._begin(bucket)
            w_host, w_device = self._divided(layer, path, count, w)
            passed = count * layer.nbytes
            wait = self._captured.start(path, compute, host_bytes, x, ids, weights, w_host, passed)

            def finish() -> torch.Tensor:
                if (copied := self._copied[layer.number]) is not None:
                    copied.wait()
                y: torch.Tensor = products(x, ids, weights, w_device)
                if layer.number + SETS < len(self._order):
                    self._copy(layer.number + SETS, bucket, self._event())
                return y.add_(wait())

            return finish

        return start

    def _begin(self, bucket: Bucket) -> None:
        """Submit the first copies. They wait for the beginning of the step, not for the layers before."""
        begun, self._begun = self._begun or self._event(), None
        for number in range(min(SETS, len(self._order))):
            self._copy(number, bucket, begun)
        if self._first is not None:
            self._first.table = tuple(map(self._noting, self._first.table))
            self._first = None

    def _copy(self, number: int, bucket: Bucket, after: Any) -> None:
        """Submit the copies of a layer, which wait for an event."""
        layer = self._order[number]
        if after is not None:
            after.wait(self._stream)
        with self._stream or nullcontext():
            layer.copy(self._passing(layer, bucket))
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

    def _passing(self, layer: _Layer, bucket: Bucket) -> int:
        """How many of the layer's experts pass: of each layer some, or of none any."""
        part = self._parts[bucket.high]
        return min(layer.count, max(1, round(part * layer.experts))) if part else 0

    def _count(
        self, layer: _Layer, bucket: Bucket, compute: OpFunction, x: torch.Tensor, ids: torch.Tensor, w: MoEWeights
    ) -> int:
        """How many of the layer's experts pass. The first layer is timed if nobody has said: not in a capture, as each
        step runs once before it is captured."""
        if bucket.high not in self._parts:
            fixed = self._percent
            self._parts[bucket.high] = self._measured(layer, compute, x, ids, w) if fixed is None else fixed / 100
        return self._passing(layer, bucket)

    def _measured(self, layer: _Layer, compute: OpFunction, x: torch.Tensor, ids: torch.Tensor, w: MoEWeights) -> float:
        """The part for steps of as many rows, whose tokens choose evenly."""
        rows, top = ids.shape
        random = np.random.default_rng(0)
        chosen = torch.from_numpy(random.random((rows, layer.experts)).argsort(1)[:, :top].astype(np.int32))
        some, factors = torch.randn(x.shape).to(x.dtype), torch.ones(rows, top)
        copying = min(self._device.measure(lambda: layer.copy(layer.count)) for _ in range(1 + _TIMES))

        def host(beside: float) -> float:
            times = []
            for _ in range(_TIMES):
                with self._stream or nullcontext():
                    for _ in range(round(beside / copying)):
                        layer.copy(layer.count)
                began = time.perf_counter()
                compute(some, chosen, factors, w)
                times.append(time.perf_counter() - began)
                self._device.synchronize()
            return min(times)

        self._device.synchronize()
        self._host.limit_threads(self._threads - (self._threads >= SPARING))
        try:
            busy = host(_LONGER * host(0.0))
        finally:
            self._host.limit_threads(self._threads)
        whole = copying * layer.experts / layer.count
        part = part_for(whole, busy, self._other)
        log.info(
            "in captured steps of %d rows %.1f%% of experts pass through the device, at most %.1f%%: of a layer, "
            "copies of all take %.2f ms, beside which the host takes %.2f ms, and %.2f ms are other work", rows,
            100 * part, 100 * layer.count / layer.experts, 1e3 * whole, 1e3 * busy, 1e3 * self._other,
        )  # fmt: skip
        return part if round(part * layer.experts) else 0.0

    def _divided(self, layer: _Layer, path: str, count: int, w: MoEWeights) -> tuple[MoEWeights, MoEWeights]:
        """The weights for the host, with a map of its experts alone, and those for the device."""
        known = self._weights.get((layer.number, count))
        if known is None or known[0] is not w:
            slots, copies = w.slots.clone(), w.copies.clone()
            slots[:count], copies[:count] = -1, 0
            placed = np.arange(layer.experts, dtype=np.int32)
            placed[count:] = -1
            there = [self._device.upload(each) for each in (placed[:, None], (placed >= 0).astype(np.int32))]
            on_device = self._biases[path].on_device(w)
            gate_up_bias, down_bias = (
                None if bias is None else bias[: layer.count] for bias in (on_device.gate_up_bias, on_device.down_bias)
            )
            on_device = on_device._replace(
                gate_up=layer.slots[0].value, down=layer.slots[1].value, slots=there[0], copies=there[1],
                gate_up_bias=gate_up_bias, down_bias=down_bias,
            )  # fmt: skip
            known = self._weights[layer.number, count] = w, w._replace(slots=slots, copies=copies), on_device
        return known[1:]
