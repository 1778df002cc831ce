"""Experts of a streamed step that the host computes where they are, while the others are copied to the device.

Both read host memory, and both take about as long for an expert with few rows: together they are done sooner than
either alone. The host gets the experts with the fewest rows (as in HybriMoE, Zhong et al. 2025), and computes in a
thread of its own, because the one that submits work to the device is busy for as long. The device adds its sums to the
host's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from evener.contracts.device import Device
from evener.contracts.ops import OpFunction
from evener.contracts.weights import MoEWeights
from evener_offload.captured_experts import SPARING, HostWork
from evener_offload.expert_costs import ExpertCosts, host_share
from evener_offload.host_backend import upload

log = logging.getLogger("evener.worker")
#: Rows of each expert with which the host is timed, beside one; how often.
_TIMED_ROWS, _TIMES = (16, 96), 2


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
        #: By path: a layer's weights, and the same with a map that only has the host's experts.
        self._own: dict[str, tuple[MoEWeights, MoEWeights]] = {}

    def close(self) -> None:
        """End the thread. Calling it again does nothing."""
        self._thread.shutdown()

    def measure(
        self, nbytes: int, copies: Callable[[float], float], compute: OpFunction, x: torch.Tensor, experts: int,
        top: int, w: MoEWeights,
    ) -> tuple[ExpertCosts, ExpertCosts]:  # fmt: skip
        """Time the host with all experts of a layer, which no cache holds: alone, and while experts are copied to the
        device, because both read the same memory. Returns the costs of both.

        Args:
            nbytes: of an expert.
            copies: waits for the copies that it started before, and starts some that take so many seconds; returns the
                seconds that one expert takes.
            x: rows [T, hidden], on the host.
        """

        def host(rows: int) -> tuple[float, float]:
            tokens = -(-rows * experts // top)
            ids = (torch.arange(tokens * top, dtype=torch.int32) % experts).view(tokens, top)
            some, weights = x[torch.arange(tokens) % len(x)], torch.ones(tokens, top)

            def fastest(copied: float) -> float:
                times = []
                for _ in range(_TIMES):
                    copies(copied)
                    began = time.perf_counter()
                    self._alone(compute, some, ids, weights, w)
                    times.append(time.perf_counter() - began)
                return min(times)

            alone = fastest(0.0)
            return alone / experts, fastest(1.5 * alone) / experts

        (few, many), copy = _TIMED_ROWS, copies(0.0)
        alone, beside = (
            ExpertCosts(copy, one, max(0.0, some - one) / (few - 1), few, max(0.0, most - some) / (many - few))
            for one, some, most in zip(host(1), host(few), host(many), strict=True)
        )
        copies(0.0)
        self._costs = nbytes, beside
        log.info(
            "an expert of %d bytes is copied in %.0f µs; beside copies the host computes it in %.0f µs with one row, "
            "%.0f µs with %d and %.0f µs with %d", nbytes, 1e6 * copy, 1e6 * beside.first, 1e6 * beside.on_host(few),
            few, 1e6 * beside.on_host(many), many,
        )  # fmt: skip
        return alone, beside

    def choose(self, nbytes: int, rows: Mapping[int, int]) -> Sequence[int]:
        """The experts that the host computes, those with the fewest rows first.

        Args:
            nbytes: of an expert.
            rows: of each expert that must be copied or computed here.
        """
        assert self._costs is not None, "measured before the first step"
        like, costs = self._costs
        return host_share(rows, costs.times(nbytes / like))

    def start(
        self, path: str, chosen: Sequence[int], nbytes: int, compute: OpFunction, x: torch.Tensor, ids: torch.Tensor,
        weights: torch.Tensor, w: MoEWeights,
    ) -> Callable[[], torch.Tensor]:  # fmt: skip
        """Start computing the chosen experts' part of each token's sum; returns what waits for it, and copies it to the
        device: [T, hidden]. ``x``, ``ids`` and ``weights`` are on the host."""
        self.computed += len(chosen)
        own, entered = self._mapped(path, chosen, w), threading.Event()

        def job() -> torch.Tensor:
            entered.set()
            began = time.perf_counter_ns()
            with torch.inference_mode():  # belongs to a thread
                found = self._alone(compute, x, ids, weights, own)
            self._work.nanoseconds += time.perf_counter_ns() - began
            self._work.read_bytes += nbytes * len(chosen)
            return found

        started = self._thread.submit(job)
        # Now the interpreter is the job's until the kernel runs. Otherwise it would wait for its turn, 5 ms, while this
        # thread submits work.
        entered.wait()
        return lambda: upload(self._device, started.result())

    def _alone(self, compute: OpFunction, *inputs: Any) -> torch.Tensor:
        """What the host computes while another thread submits work: with one thread less."""
        self._host.limit_threads(self._threads - (self._threads >= SPARING))
        try:
            found: torch.Tensor = compute(*inputs)
        finally:
            self._host.limit_threads(self._threads)
        return found

    def _mapped(self, path: str, chosen: Sequence[int], w: MoEWeights) -> MoEWeights:
        """The weights of the layer, with -1 for the slots of all other experts. The same tensors each time: kernels
        know their addresses."""
        known = self._own.get(path)
        if known is None or known[0] is not w:
            known = self._own[path] = w, w._replace(slots=w.slots.clone(), copies=w.copies.clone())
        slots, copies, kept = known[1].slots.numpy(), known[1].copies.numpy(), list(chosen)
        slots[:], copies[:] = -1, 0
        slots[kept], copies[kept] = w.slots.numpy()[kept], 1
        return known[1]
