"""Experts of a streamed step that the host computes where they are, while the others are copied to the device.

Both read host memory, and both take about as long for an expert with few rows: together they are done sooner than
either alone. The host gets the experts with the fewest rows (as in HybriMoE, Zhong et al. 2025), and computes in a
thread of its own, because the one that submits work to the device is busy for as long. The device adds its sums to the
host's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from evener.contracts.device import Device
from evener.contracts.ops import OpFunction
from evener.contracts.weights import MoEWeights
from evener_offload.captured_experts import SPARING, HostWork
from evener_offload.expert_costs import ExpertCosts, host_share
from evener_offload.host_backend import upload

log = logging.getLogger("evener.worker")
#: Rows of each expert with which the host is timed, beside one; how often.
_TIMED_ROWS, _TIMES = 16, 2
#: After so many layers the host's pace beside copies is known. Then the division depends on nothing but the routing.
_LEARNED = 64
#: How much one layer changes what is known of the pace.
_CHANGE = 0.25


class PromptShare:
    """The host's part of streamed steps.

    Args:
        host: the device that computes experts on the host, with so many ``threads``.
        select: prepares a thread for compute there.
        work: counts what the host computes.

    Attributes:
        computed: experts that the host computed beside copies.
    """

    def __init__(self, device: Device, host: Device, threads: int, select: Callable[[], None], work: HostWork) -> None:
        self._device, self._host, self._work, self.computed = device, host, work, 0
        self._threads = threads
        self._thread = ThreadPoolExecutor(1, "evener-prompt-share", initializer=select)
        #: Costs of an expert of so many bytes; None: not measured yet.
        self._costs: tuple[int, ExpertCosts] | None = None
        #: How much longer the host takes beside copies than alone, and the layers that this is known from.
        self._pace, self._known = 1.0, 0
        #: By path: a layer's weights, and the same with a map that only has the host's experts.
        self._own: dict[str, tuple[MoEWeights, MoEWeights]] = {}

    def close(self) -> None:
        """End the thread. Calling it again does nothing."""
        self._thread.shutdown()

    def measure(
        self, nbytes: int, copy: float, compute: OpFunction, x: torch.Tensor, experts: int, top: int, w: MoEWeights
    ) -> ExpertCosts:  # fmt: skip
        """Time the host with all experts of a layer, which no cache holds.

        Args:
            nbytes, copy: of an expert; seconds of its copy to the device.
            x: rows [T, hidden], on the host.
        """

        def host(rows: int) -> float:
            tokens = -(-rows * experts // top)
            ids = (torch.arange(tokens * top, dtype=torch.int32) % experts).view(tokens, top)
            some, weights = x[torch.arange(tokens) % len(x)], torch.ones(tokens, top)
            times = []
            for _ in range(_TIMES):
                began = time.perf_counter()
                compute(some, ids, weights, w)
                times.append(time.perf_counter() - began)
            return min(times) / experts

        one, several = host(1), host(_TIMED_ROWS)
        costs = ExpertCosts(copy, one, max(0.0, several - one) / (_TIMED_ROWS - 1))
        self._costs = nbytes, costs
        log.info("beside copies the host computes an expert of %d bytes in %.0f µs with one row, and %.1f µs with each "
                 "more", nbytes, 1e6 * costs.first, 1e6 * costs.more)  # fmt: skip
        return costs

    def choose(self, nbytes: int, rows: Mapping[int, int]) -> Mapping[int, float]:
        """The experts that the host computes, and the seconds that each of them takes it alone.

        Args:
            nbytes: of an expert.
            rows: of each expert that must be copied or computed here.
        """
        assert self._costs is not None, "measured before the first step"
        like, costs = self._costs
        longer, pace = nbytes / like, self._pace
        costs = ExpertCosts(costs.copy * longer, costs.first * longer, costs.more * longer)
        paced = replace(costs, first=costs.first * pace, more=costs.more * pace)
        return {expert: costs.on_host(rows[expert]) for expert in host_share(rows, paced)}

    def start(
        self, path: str, chosen: Mapping[int, float], nbytes: int, compute: OpFunction, x: torch.Tensor,
        ids: torch.Tensor, weights: torch.Tensor, w: MoEWeights,
    ) -> Callable[[], torch.Tensor]:  # fmt: skip
        """Start computing the chosen experts' part of each token's sum; returns what waits for it, and copies it to the
        device: [T, hidden]. ``x``, ``ids`` and ``weights`` are on the host."""
        self.computed += len(chosen)
        own = self._mapped(path, chosen, w)

        def job() -> torch.Tensor:
            began = time.perf_counter_ns()
            self._host.limit_threads(self._threads - (self._threads >= SPARING))
            try:
                with torch.inference_mode():  # belongs to a thread
                    found: torch.Tensor = compute(x, ids, weights, own)
            finally:
                self._host.limit_threads(self._threads)
            spent = time.perf_counter_ns() - began
            self._work.nanoseconds += spent
            self._work.read_bytes += nbytes * len(chosen)
            if self._known < _LEARNED:
                self._known += 1
                self._pace += _CHANGE * (spent / 1e9 / sum(chosen.values()) - self._pace)
            return found

        started = self._thread.submit(job)
        return lambda: upload(self._device, started.result())

    def _mapped(self, path: str, chosen: Mapping[int, float], w: MoEWeights) -> MoEWeights:
        """The weights of the layer, with -1 for the slots of all other experts. The same tensors each time: kernels
        know their addresses."""
        known = self._own.get(path)
        if known is None or known[0] is not w:
            known = self._own[path] = w, w._replace(slots=w.slots.clone(), copies=w.copies.clone())
        slots, copies, kept = known[1].slots.numpy(), known[1].copies.numpy(), list(chosen)
        slots[:], copies[:] = -1, 0
        slots[kept], copies[kept] = w.slots.numpy()[kept], 1
        return known[1]
