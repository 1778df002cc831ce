"""Which part of the experts passes through the device in captured steps (``captured_passing``): the one with which the
link and the host end together. Copies do not depend on what tokens choose; what the host reads does, so the host is
timed with as many rows as the step has."""

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
#: Percent of experts that may pass, at most.
MOST = 50
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
    return auto_or_number("pass_experts", value, MOST, f"the percent of a layer's experts, from 1 to {MOST}")


class Passing(NamedTuple):
    """What the user asks for.

    Attributes:
        percent: as of ``parse_part``.
        least: rows of the smallest step.
        chosen: whether the most chosen ones pass.
    """

    percent: int | None
    least: int
    chosen: bool


def parse_passing(config: ResolvedConfig) -> Passing:
    """What ``offload.pass_experts`` and the keys beside it say.

    Raises:
        ConfigError: a value is wrong.
    """
    percent, least = parse_part(str(option(config, "pass_experts"))), int(option(config, "pass_experts_rows"))
    if least < 1:
        raise ConfigError(f"offload.pass_experts_rows={least}: set the rows of the smallest such step, at least 1")
    return Passing(percent, least, bool(option(config, "pass_most_chosen")))


def part_for(copying: float, host: float, other: float, every: float | None = None) -> float:
    """The part of the experts that pass so that the host and the link are done at the same time: with the part X, the
    host takes ``host - every * X + other``, and the link ``copying * X``.

    Args:
        copying: seconds for all experts of a layer.
        host: seconds for those that the host computes if none pass, of which it reads what is chosen.
        other: seconds of a step in which the host does not compute, for each such layer.
        every: seconds of the host for all experts of a layer; None: ``host``, as it computes all.
    """
    return (host + other) / (copying + (host if every is None else every))


class PassingPart:
    """Decides how many experts of a layer pass.

    Args:
        stream: of the copies; None: the device has one queue.
        host: the device that computes experts there, with so many ``threads``.
        percent: as of ``parse_part``.
        other: seconds of a step in which the host does not compute, for each layer of which experts pass.
        chosen: whether the experts that pass are those that are chosen most.

    Attributes:
        percent: see there.
        known: by the largest number of rows of a bucket: the part that passes. Kernels of the host know the weights of
            their last call, so a bucket has one part.
    """

    def __init__(
        self, device: Device, stream: Any, host: Device, threads: int, percent: int | None, other: float, chosen: bool
    ) -> None:
        self._device, self._stream, self._host, self._threads = device, stream, host, threads
        self.percent, self._other, self.known = percent, other, dict[int, float]()
        self._chosen = chosen

    def count(self, layer: PassingLayer, bucket: Bucket) -> int:
        """How many of the layer's experts pass in steps of a bucket that is known."""
        return layer.passing(self.known[bucket.high])

    def most(self, layer: PassingLayer) -> int:
        """How many of them pass in some step, as far as that is known."""
        known = self.known.values() if self.percent is None else [self.percent / 100]
        return max(map(layer.passing, known), default=0)

    def settle(
        self, layer: PassingLayer, bucket: Bucket, compute: OpFunction,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], w: MoEWeights, link: Callable[[], None],
    ) -> int:  # fmt: skip
        """The same as ``count``. The first layer is timed if nobody has said: not in a capture, as each step runs once
        before it is captured.

        Args:
            compute: ``routed_experts`` on the host. w: the layer's weights there.
            inputs: rows, ids and weights of a step, of which only sizes count.
            link: submits copies of all experts that may pass.
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
        """The part for steps of as many rows, whose tokens choose evenly."""
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
        # Experts with slots of their own take neither time, but what passes is a part of all. If the most chosen ones
        # do, the host would have read them, too.
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
