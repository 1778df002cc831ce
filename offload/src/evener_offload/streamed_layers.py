"""Host layers in steps with many tokens: their experts are copied to slots on the device, and computed there, because
that is faster than computing on the host (``offload.stream_prompts``). Such a step is streamed. If measured costs
decide, the host computes some of the experts meanwhile (``prompt_share``).

Equal layers share slots. One half of the slots is filled, on a stream of its own, while the device computes with the
other half. The first experts of the next layer are copied while this layer's last ones are computed. The layers that a
step reaches first have their experts on the device. Meanwhile slots are filled with the experts that most rows of the
last streamed step chose (``prefetch``). If the device's kernels read another layout than the host's, host memory holds
the experts a second time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from evener.contracts.declared import CallSite
from evener.contracts.device import Device
from evener.contracts.ops import Bucket, OpFunction, Static
from evener.contracts.placement import Placement
from evener.contracts.quant import Packing
from evener.contracts.weights import MoEWeights
from evener.distributed.agreement import Agreement
from evener.layers.builder import Builder
from evener.resolution.resolver import Resolver
from evener_offload.expert_costs import least_streamed
from evener_offload.host_backend import auto_or_number
from evener_offload.next_router import NextRouter
from evener_offload.passing_experts import PassingExperts
from evener_offload.placed_layers import Biases, biases_for_device, stacks
from evener_offload.prefetch import Place, Prefetch
from evener_offload.prompt_share import PromptShare
from evener_offload.resident_layer import ResidentLayer
from evener_offload.residents import Wave
from evener_offload.second_layout import Stacks, expert_bytes, keep, kind_of, second_bytes, second_layout
from evener_offload.slot_products import SlotProducts

log = logging.getLogger("evener.worker")
#: Slots of a group of equal layers, at least; and bytes of half of them, unless all of a layer's experts have fewer.
#: The copies to one half should last longer than it takes to submit the products with the other half, and until the
#: next layer's rows are known. The copies to all slots should last as long as the device's own layers take.
SLOTS = 32
HALF_BYTES = 192 << 20
#: More tokens than any step has.
_NEVER = 1 << 30
#: If measured costs decide, the device's layout may take at most so many times the bytes of the host's.
_MOST_GROWTH = 1.5
#: How often copies are timed.
_TIMES = 3
#: So many copies of half of the slots are timed together.
_HALVES = 4
#: Seconds to submit a streamed layer's copies and products, in addition to the time of its copies.
_SUBMITTED = 1e-3
#: Tokens of the largest step for which costs are calculated.
_MOST_TOKENS = 1 << 20

#: ``routed_experts`` on the host: from rows [T, hidden], ids and weights [T, k], and the layer's weights, to sums
#: [T, hidden].
OnHost = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, MoEWeights], torch.Tensor]


def parse_threshold(value: str) -> int | None:
    """Parse ``offload.stream_prompts``: None: measured costs decide; the tokens of the smallest streamed step; 0: off.

    Raises:
        ConfigError: the value is something else.
    """
    return auto_or_number("stream_prompts", value, _NEVER - 1, "the tokens of the smallest such step")


def slots_for(nbytes: int, experts: int) -> int:
    """How many slots layers with so many ``experts`` of ``nbytes`` bytes each share."""
    return min(experts, max(SLOTS, 2 * -(-HALF_BYTES // nbytes)))


class Copies:
    """Copies of experts to slots: their time is measured, and the host is timed beside them."""

    def __init__(self, device: Device, slots: ResidentLayer, stream: Any) -> None:
        self._device, self._slots, self._stream = device, slots, stream
        times = []
        for _ in range(1 + _TIMES):
            began = time.perf_counter()
            self._start(_HALVES)
            device.synchronize()
            times.append(time.perf_counter() - began)
        self._half = min(times) / _HALVES

    def __call__(self, seconds: float) -> float:
        """Wait for the copies before, and start copies that take so many seconds. Returns the seconds of one expert."""
        self._device.synchronize()
        self._start(round(seconds / self._half))
        return self._half / self._slots.residents.half

    def _start(self, halves: int) -> None:
        with self._stream or nullcontext():
            for _ in range(halves):
                self._slots.copy_half()


class StreamedLayers:
    """The host layers of this rank's stage, in streamed steps.

    Args:
        sites: call sites of these layers; their weights are placed, and have no layout yet.
        host, resolver: the resolvers of the host and of the device.
        placement: of the experts.
        least: tokens of the smallest streamed step; None: measured costs decide.
        stream: for the copies; None: the device has only one queue.
        share: computes the host's part beside copies, if measured costs decide.

    Attributes:
        groups: the slots of each group of equal layers.
        second_bytes: bytes of experts that are in host memory a second time, as the device reads them.
        tokens: tokens of streamed steps, counted once for each layer.
        biases: by path: the experts' biases on the device.
        stacks: by path: the experts as the device reads them.
    """

    def __init__(
        self, *, sites: Sequence[CallSite], own: Builder, host: Resolver, resolver: Resolver, device: Device,
        placement: Placement, least: int | None, stream: Any, share: PromptShare | None = None,
    ) -> None:  # fmt: skip
        self._device, self._resolver, self._least, self._share = device, resolver, least, share
        self._stream = stream
        self._agreement = Agreement(own.communicator, device.torch_device)
        self.tokens = self.second_bytes = 0
        self._places: dict[str, Place] = {}
        #: Paths of the layers that a step reaches first and last.
        self._ends = (sites[0].path, sites[-1].path) if sites else ("", "")
        self._next: dict[str, NextRouter] = {}
        self.biases, self.stacks = dict[str, Biases](), dict[str, Stacks]()
        #: Whether ``begin`` has told ``share`` of this step.
        self._begun = False
        self.groups: list[ResidentLayer] = []
        self._prefetch = Prefetch({}, share)
        if not sites:
            return
        packings = resolver.packings_by_layout
        found = [(site, second_layout(site, host, resolver, "the device")) for site in sites]
        self.second_bytes = sum(second_bytes(site, others, packings) for site, others in found)
        self.stacks = {site.path: others for site, others in found}
        groups: dict[Any, list[tuple[CallSite, Stacks]]] = {}
        for site, others in found:
            keep(site, others, own, placement)
            self.biases[site.path] = biases_for_device(site, own)
            groups.setdefault(kind_of(others), []).append((site, others))
        places = dict[str, Place]()
        for group in groups.values():
            experts = group[0][0].static["experts"]
            count = slots_for(expert_bytes(group[0][1], packings), experts)
            held, passing = [others for _, others in group], PassingExperts(count, experts)
            slots = ResidentLayer(held, experts, own, packings, count, device, stream, passing)
            self.groups.append(slots)
            places |= {site.path: Place(slots, passing, number) for number, (site, _) in enumerate(group)}
        self._places |= {site.path: places[site.path] for site in sites}
        self._prefetch = Prefetch(self._places, share)
        if stream is not None:
            every = [site for site in own.sites if site.op == "moe_block"]
            for site, following in pairwise(every):
                if site.path in self._places and following.path in self._places:
                    self._next[site.path] = NextRouter(following, own)
        what = "measured costs decide" if least is None else f"those with {least} tokens or more"
        also = "" if share is None else "; the host computes those with few rows meanwhile"
        resolver.manifest.notes.append(f"experts of host layers are copied to the device for large steps: {what}{also}")

    @staticmethod
    def worthwhile(sites: Sequence[CallSite], host: Resolver, resolver: Resolver, stream: Any, free: int) -> bool:
        """Whether measured costs may decide: copies run beside compute, no device layout is much larger than the
        host's, and ``free`` bytes of host memory hold both layouts. Gives the stacks of ``sites`` the host's layout."""
        if stream is None:
            return False
        total, probe = 0, Resolver(resolver.available)  # its manifest is thrown away
        for site in sites:
            found = second_layout(site, host, probe, "the device")
            first = expert_bytes(stacks(site), host.packings_by_layout)
            second = expert_bytes(found, resolver.packings_by_layout)
            if second > _MOST_GROWTH * first:
                return False
            total += site.static["experts"] * first + second_bytes(site, found, resolver.packings_by_layout)
        return total <= free

    @staticmethod
    def room(sites: Sequence[CallSite], packings: Mapping[str, Packing]) -> int:
        """Bytes of device memory that the slots may need. The stacks of ``sites`` have layouts of the device's
        ``packings``."""
        each = {expert_bytes(stacks(site), packings): site.static["experts"] for site in sites}
        return sum(nbytes * slots_for(nbytes, experts) for nbytes, experts in each.items())

    @property
    def copied(self) -> int:
        """Bytes of experts that were copied."""
        return sum(slots.residents.copied * slots.nbytes for slots in self.groups)

    def takes(self, tokens: int) -> bool | None:
        """Whether a step of so many tokens is streamed; None: not known yet, ``measure`` must decide."""
        return bool(self._places) and (None if self._least is None else tokens >= self._least)

    def begin(self, tokens: int) -> None:
        """A step of so many tokens begins. Its own uploads have been submitted."""
        self._begun = bool(self.takes(tokens))
        if self._begun and self._share is not None:
            self._share.begin(tokens)
        if self._begun and self._stream is not None:
            self._prefetch.begin(tokens)

    def resolve(self, path: str, static: Static, bucket: Bucket, compute: OpFunction) -> OpFunction | None:
        """A function that starts a streamed step of one layer, and returns a function that waits for the sums
        [T, hidden]. None if no step of the bucket is streamed.

        Args:
            compute: ``routed_experts`` on the host, for streamed steps alone.
        """
        place = self._places.get(path)
        if place is None or (self._least is not None and bucket.high < self._least):
            return None
        device, slots = self._device, place.slots
        products = SlotProducts(slots, place.number, device, self._resolver, f"{path} streamed", static, bucket, True)
        following, guess = self._following(path), None
        if following is not None:
            guess = self._next[path].resolve(self._resolver, bucket)

        share, prefetch, first = self._share, self._prefetch, place.number * slots.experts
        begins, ends, biases = path == self._ends[0], path == self._ends[1], self.biases[path]

        def start(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w: MoEWeights) -> Any:
            tokens = x.shape[0]
            self.tokens += tokens
            if share is not None and begins and not self._begun:
                share.begin(tokens)
            chosen = device.readback(ids)
            copies = (device.readback(x), device.readback(weights)) if share is not None and share.active else ()
            guessed = None if guess is None else device.readback(guess(x))

            def finish() -> torch.Tensor:
                here, others, beside = chosen.wait(), set[int](), None
                numbers, copied = here.numpy(), slots.residents.copied
                rows = np.bincount(numbers.ravel(), minlength=slots.experts)
                prefetch.note_routing(path, tokens, rows)
                if share is not None:
                    share.note_chosen(slots.nbytes * np.count_nonzero(rows))
                if share is not None and copies:
                    (missing,) = (absent := place.absent(rows)).nonzero()
                    part = share.choose(slots.nbytes, missing, absent[missing], prefetch.under_way)
                    if len(part):
                        inputs, factors = (copy.wait() for copy in copies)
                        beside = share.start(path, part, slots.nbytes, compute, inputs, here, factors, w)
                        others = {*(part + first).tolist()}

                def ahead(last: Wave | None) -> None:
                    prefetch.note_copies(slots.nbytes, slots.residents.copied - copied)
                    if following is not None and guessed is not None:
                        self._ahead(following, guessed.wait().numpy(), last if following.slots is slots else None)

                y = products(x, ids, weights, biases.on_device(w), numbers, others, ahead)
                y = y if beside is None else beside(y)
                if share is not None and ends:
                    share.end()
                return y

            return finish

        return start

    def _ahead(self, place: Place, guessed: np.ndarray[Any, Any], last: Wave | None) -> None:
        """Copy the experts that a layer will probably need, those with the most rows first, without those that the host
        will compute. This is before the ``last`` products of the layer before are submitted, because to submit them
        takes the host as long as some copies."""
        slots, copied, share = place.slots, place.slots.residents.copied, self._share
        rows = place.absent(np.bincount(guessed.ravel(), minlength=slots.experts))
        if share is not None and share.active:
            (likely,) = rows.nonzero()
            rows[share.choose(slots.nbytes, likely, rows[likely])] = 0
        most = (-rows).argsort(kind="stable")[: min(slots.residents.half, np.count_nonzero(rows))]
        slots.ahead((np.sort(most) + place.number * slots.experts).tolist(), last)
        self._prefetch.note_copies(slots.nbytes, slots.residents.copied - copied)

    def _following(self, path: str) -> Place | None:
        if path not in self._next:
            return None
        return self._places[self._next[path].path]

    def measure(self, path: str, static: Static, compute: OnHost, x: torch.Tensor, w: MoEWeights) -> None:
        """Measure, and decide from which number of tokens on steps are streamed. ``x``: a layer's rows. All ranks must
        call this together."""
        slots, experts, top = self._places[path].slots, static["experts"], static["top"]
        assert self._share is not None, "measured costs decide"
        copies, rows = Copies(self._device, slots, self._stream), self._device.readback(x).wait()
        costs, beside = self._share.measure(slots.nbytes, copies, compute, rows, experts, top, w)
        least = least_streamed(experts, top, costs, _MOST_TOKENS, beside, _SUBMITTED) or _NEVER
        (self._least,) = self._agreement.most([least])
        shown = "never streamed" if self._least >= _NEVER else f"streamed from {self._least} tokens on"
        log.info(
            "the host alone computes an expert of %d bytes in %.0f µs with one row and %.1f µs with each more: host "
            "layers are %s", slots.nbytes, 1e6 * costs.first, 1e6 * costs.more, shown,
        )  # fmt: skip
