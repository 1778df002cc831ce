"""Experts on the host in captured steps. The device copies each layer's rows, expert ids and weights to page-locked
memory, calls the host, and copies the result back, all on a stream of its own: meanwhile it computes the layer's shared
experts. A replay is one call, and the device waits for the host, not the other way round. As in KTransformers.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from evener.contracts.device import Device
from evener.contracts.ops import OpFunction
from evener.contracts.weights import MoEWeights
from evener.errors import EngineError
from evener.resolution.attribution import Attribution

log = logging.getLogger("evener.worker")
#: With so many threads or more, one of them does not compute while another thread of the process is busy.
SPARING = 4


@dataclass
class HostWork:
    """What the host has computed: bytes of experts that it read, nanoseconds that it computed, and halved steps."""

    read_bytes: int = 0
    nanoseconds: int = 0
    halved: int = 0


@runtime_checkable
class Exchanges(Protocol):
    """A device that copies to the host, calls it and copies back faster than by ``host_call`` between copies."""

    def exchange(
        self, inputs: Sequence[torch.Tensor], to: Sequence[torch.Tensor], work: Callable[[], None],
        found: torch.Tensor, result: torch.Tensor,
    ) -> None:  # fmt: skip
        """Copy each of ``inputs`` (rows [T, n], ids int32 and weights float32 [T, k]) to page-locked memory ``to``, run
        ``work`` as ``Device.host_call`` does, then copy page-locked ``found`` to ``result``: on the current stream.
        Replays of a capture do it again. The caller keeps ``work``, ``to`` and ``found``."""


class _Buffers(NamedTuple):
    """Page-locked memory for the rows of a layer; layers run one after another, so all of them use it."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    found: torch.Tensor


class CapturedExperts:
    """Submits the work of a layer. The host's threads compute only rows that are not padding.

    Args:
        host: the device that computes the experts.
        threads: that it may use.
        attribution: names the kernel that failed.
        first: path of the layer that a step reaches first.
        work: counts what the host computes.

    Attributes:
        steps: replays so far.
    """

    def __init__(
        self, device: Device, host: Device, threads: int, attribution: Attribution, first: str, work: HostWork
    ) -> None:
        self._device, self._host, self._attribution = device, host, attribution
        self._threads = threads
        self._first, self._work, self.steps = first, work, 0
        self._buffers: dict[Any, _Buffers] = {}
        #: The functions that captures call, which know only their addresses.
        self._calls: list[Callable[[], None]] = []
        #: Rows of the replays that were submitted and have not begun; rows of the step that runs (None: all).
        self._submitted: deque[int] = deque()
        self._rows: int | None = None
        self._failure: Exception | None = None
        self._stream: Any = None
        #: None: by ``host_call``, between copies.
        self._exchanges = device if isinstance(device, Exchanges) else None

    def replayed(self, rows: int) -> None:
        """As ``Placement.replayed``.

        Raises:
            EvenerError: the host failed in an earlier step.
        """
        self.check()
        self._submitted.append(rows)
        self.steps += 1

    def check(self) -> None:
        """Raise what failed on the host.

        Raises:
            EvenerError: with the kernel that failed, if it was one.
        """
        if self._failure is not None:
            self._attribution.raise_attributed(self._failure)
            raise EngineError(f"computing experts on the host failed: {self._failure}") from self._failure

    def start(
        self, path: str, compute: OpFunction, expert_bytes: int,
        x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: MoEWeights,
    ) -> Callable[[], torch.Tensor]:  # fmt: skip
        """Submit the layer ``path``; returns what makes the device wait for the result [T, hidden].

        Args:
            compute: ``routed_experts`` on the host.
            expert_bytes: of the weights of one expert.
        """
        device, inputs = self._device, [x, ids, weights]
        to, result = self._buffers_for(inputs), torch.empty_like(x)
        call = partial(self._call, path == self._first, _bound(compute, to, experts), expert_bytes, to.ids.numpy())
        self._calls.append(call)
        beside = self._beside()
        before, after = (None, None) if beside is None else (device.new_event(), device.new_event())
        if before is not None:
            before.record()
        with beside or nullcontext():
            if before is not None:
                before.wait()
            if self._exchanges is not None:
                self._exchanges.exchange(inputs, to[:3], call, to.found, result)
            else:
                for tensor, copy in zip(inputs, to, strict=False):
                    copy.copy_(tensor, non_blocking=True)
                device.host_call(call)
                result.copy_(to.found, non_blocking=True)
            if after is not None:
                after.record()

        def wait() -> torch.Tensor:
            if after is not None:
                after.wait()
            inputs.clear()  # until now nothing else may take their memory
            return result

        return wait

    def _call(self, begins: bool, compute: Callable[[int], None], expert_bytes: int, ids: np.ndarray[Any, Any]) -> None:
        """The function that the device calls."""
        if begins:
            self._rows = self._submitted.popleft() if self._submitted else None
        if self._failure is not None or self._rows == 0:
            return
        collects = gc.isenabled()
        gc.disable()  # a collection here could free what calls the device, which a function that it calls must not do
        try:
            began, rows = time.perf_counter_ns(), len(ids) if self._rows is None else self._rows
            # The thread that waits for the step spins on a core. If the host computed on all of them, the thread that
            # shares its core would hold up the others in every product.
            self._host.limit_threads(self._threads - (self._threads >= SPARING))
            compute(rows)
            self._host.limit_threads(self._threads)
            self._work.nanoseconds += time.perf_counter_ns() - began
            self._work.read_bytes += expert_bytes * len(set(ids[:rows].ravel().tolist()))
        except Exception as error:  # raised by ``check``: nothing could catch it here
            self._failure = error
        finally:
            if collects:
                gc.enable()

    def _beside(self) -> Any:
        """A stream beside the one that computes; None if the device has one queue."""
        if self._stream is None:
            try:
                self._stream = self._device.new_stream()
            except NotImplementedError:
                self._stream = False
        return self._stream or None

    def _buffers_for(self, inputs: Sequence[torch.Tensor]) -> _Buffers:
        key = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        found = self._buffers.get(key)
        if found is None:
            made = [self._locked(tensor) for tensor in (*inputs, inputs[0])]
            found = self._buffers[key] = _Buffers(*made)
            log.info("memory: %d bytes of page-locked memory for experts of captured steps of %d rows",
                     sum(tensor.nbytes for tensor in made), len(inputs[0]))  # fmt: skip
        return found

    def _locked(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros like a tensor of the device, in page-locked memory if the device has it."""
        nbytes = math.prod(like.shape) * like.element_size()
        raw = next(iter(self._device.pinned_buffers(1, nbytes)), None)
        raw = torch.empty(nbytes, dtype=torch.uint8) if raw is None else raw
        return raw.zero_().view(like.dtype).view(like.shape)


def _bound(compute: OpFunction, to: _Buffers, experts: MoEWeights) -> Callable[[int], None]:
    """A function that computes the first rows of ``to``, as many as it is told."""
    if getattr(compute, "takes_out", False):
        return lambda count: compute(to.x, to.ids, to.weights, experts, out=to.found, rows=count)

    def rows(count: int) -> None:
        with torch.inference_mode():  # belongs to a thread
            to.found[:count].copy_(compute(to.x[:count], to.ids[:count], to.weights[:count], experts))

    return rows
