"""How many experts pass through the device in captured steps (``captured_passing``): so many that the link and the host
end at the same time. Copies do not depend on what tokens choose. What the host reads does, so the host is timed with as
many rows as the step has."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from evener.config.resolve import ResolvedConfig
from evener.contracts.device import Device
from evener.contracts.ops import Bucket, OpFunction
from evener.contracts.weights import MoEWeights
from evener.errors import ConfigError
from evener_offload.captured_experts import SPARING
from evener_offload.host_backend import auto_or_number, option
from evener_offload.passing_places import expert_map
from evener_offload.passing_slots import PassingLayer

log = logging.getLogger("evener.worker")
#: At most so many percent of a layer's experts may pass.
MOST = 50
#: Seconds in which the host does not compute experts, for each layer of the model: attention, products of the device,
#: and the call of the host. An H200 took 7.6 ms for the 48 layers of Qwen3-30B-A3B, besides the host's part.
OTHER = 1.6e-4
#: How often copies and the host are timed.
_TIMES = 3
#: The host is timed beside copies that take so many times as long as the host alone.
_LONGER = 1.5


def parse_part(value: str) -> int | None:
    """Parse ``offload.pass_experts``: percent of a layer's experts; None: measured costs decide; 0: none pass.

    Raises:
        ConfigError: the value is something else.
    """
    return auto_or_number("pass_experts", value, MOST, f"the percent of a layer's experts, from 1 to {MOST}")


class Passing(NamedTuple):
    """What the user asks for.

    Attributes:
        percent: see ``parse_part``.
        least: rows of the smallest step in which experts pass.
        chosen: whether the most chosen experts pass; else the first ones.
    """

    percent: int | None
    least: int
    chosen: bool


def parse_passing(config: ResolvedConfig) -> Passing:
    """Parse ``offload.pass_experts``, ``pass_experts_rows`` and ``pass_most_chosen``.

    Raises:
        ConfigError: a value is wrong.
    """
    percent, least = parse_part(str(option(config, "pass_experts"))), int(option(config, "pass_experts_rows"))
    if least < 1:
        raise ConfigError(f"offload.pass_experts_rows={least}: set the rows of the smallest such step, at least 1")
    return Passing(percent, least, bool(option(config, "pass_most_chosen")))


def part_for(copying: float, host: float, other: float, every: float | None = None) -> float:
    """The part X of a layer's experts that must pass so that the host and the link end at the same time: the host takes
    ``host - every * X + other`` seconds, and the link ``copying * X`` seconds.

    Args:
        copying: seconds of the copies of all experts of a layer.
        host: seconds of the host for a layer if no experts pass. It reads only chosen experts.
        other: seconds of a step in which the host does not compute, for each layer in which experts pass.
        every: by how many seconds the host would be faster if all experts passed (X = 1); None: ``host``.
    """
    return (host + other) / (copying + (host if every is None else every))


class PassingPart:
    """Decides how many experts of a layer pass.

    Args:
        stream: for the copies; None: the device has only one queue.
        host: the device that computes experts on the host, with so many ``threads``.
        percent: see ``parse_part``.
        other: see ``part_for``.
        chosen: whether the most chosen experts pass.

    Attributes:
        percent: see ``parse_part``.
        known: by the largest number of rows of a bucket: the part that passes. A kernel of the host keeps the weights
            of its last call, so each bucket has one part.
    """

    def __init__(
        self, device: Device, stream: Any, host: Device, threads: int, percent: int | None, other: float, chosen: bool
    ) -> None:
        self._device, self._stream, self._host, self._threads = device, stream, host, threads
        self.percent, self._other, self.known = percent, other, dict[int, float]()
        self._chosen = chosen

    def count(self, layer: PassingLayer, bucket: Bucket) -> int:
        """How many of the layer's experts pass in steps of a bucket in ``known``."""
        return layer.passing(self.known[bucket.high])

    def most(self, layer: PassingLayer) -> int:
        """The largest number of the layer's experts that pass in some step, as far as that is known."""
        known = self.known.values() if self.percent is None else [self.percent / 100]
        return max(map(layer.passing, known), default=0)

    def settle(
        self, layer: PassingLayer, bucket: Bucket, compute: OpFunction,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], w: MoEWeights, link: Callable[[], None],
    ) -> int:  # fmt: skip
        """As ``count``, but first settles the part for the bucket, if it is not known. If it must be measured, this
        times the layer. Not in a capture: each step runs once before it is captured.

        Args:
            compute: ``routed_experts`` on the host.
            inputs: rows, ids and weights of a step; only their sizes matter.
            w: the layer's weights on the host.
            link: submits copies of as many experts as there are slots for.
        """
        if bucket.high not in self.known:
            fixed = self.percent
            x, ids, _ = inputs
            self.known[bucket.high] = self._measured(layer, compute, x, ids, w, link) if fixed is None else fixed / 100
        return self.count(layer, bucket)

    def _measured(
        self, layer: PassingLayer, compute: OpFunction, x: torch.Tensor, ids: torch.Tensor, w: MoEWeights,
        link: Callable[[], None],
    ) -> float:  # fmt: skip
        """The part for steps with as many rows as ``x``, if tokens choose experts evenly."""
        rows, top = ids.shape
        random = np.random.default_rng(0)
        chosen = torch.from_numpy(random.random((rows, layer.experts)).argsort(1)[:, :top].astype(np.int32))
        some, factors = torch.randn(x.shape).to(x.dtype), torch.ones(rows, top)
        absent = np.arange(layer.experts - layer.absent, layer.experts, dtype=np.int32)
        slots, copies = expert_map(layer.experts, absent, absent)
        there = w._replace(slots=slots, copies=copies)
        copying = min(self._device.measure(link) for _ in range(1 + _TIMES))

        def host(beside: float) -> float:
            times = []
            for _ in range(_TIMES):
                with self._stream or nullcontext():
                    for _ in range(round(beside / copying)):
                        link()
                began = time.perf_counter()
                compute(some, chosen, factors, there)
                times.append(time.perf_counter() - began)
                self._device.synchronize()
            return min(times)

        self._device.synchronize()
        self._host.limit_threads(self._threads - (self._threads >= SPARING))
        try:
            busy = host(_LONGER * host(0.0))
        finally:
            self._host.limit_threads(self._threads)
        # Experts with slots of their own need neither the host nor the link, but the part is of all experts. If the
        # most chosen experts pass, the host would have read nearly all of them; of the first ones, only those chosen.
        read = layer.absent * (len(np.unique(chosen)) / layer.experts if self._chosen else 1.0)
        whole, every = copying * layer.experts / layer.count, busy * layer.experts / read
        part = part_for(whole, busy, self._other, every)
        log.info(
            "in captured steps of %d rows %.1f%% of experts pass through the device, at most %.1f%%: of a layer, "
            "the link takes %.2f ms for all, the host beside it %.2f ms for %d of %d, and other work %.2f ms",
            rows, 100 * part, 100 * layer.count / layer.experts, 1e3 * whole, 1e3 * busy, layer.absent, layer.experts,
            1e3 * self._other,
        )  # fmt: skip
        return part if round(part * layer.experts) else 0.0
