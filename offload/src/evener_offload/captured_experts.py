"""Experts on the host in captured steps. The device copies each layer's rows, expert ids and weights to page-locked
memory, calls the host, and copies the result back, all on a stream of its own: meanwhile it computes the layer's shared
experts. A replay is one call, and the device waits for the host, not the other way round. As in KTransformers.

If the host's kernels can answer the device by themselves, one call of them answers a whole step: a thread of Python
would wait for the interpreter's lock in each layer, while the thread that prepares the next step holds it.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from evener.config.resolve import ResolvedConfig
from evener.contracts.device import Device
from evener.contracts.ops import OpFunction
from evener.contracts.weights import MoEWeights
from evener.errors import EngineError
from evener.plugins.discover import installed_catalog
from evener.resolution.attribution import Attribution

log = logging.getLogger("evener.worker")
#: With so many threads or more, one of them does not compute while another thread of the process is busy.
SPARING = 4


@dataclass
class HostWork:
    """What the host has computed: bytes of experts that it read, nanoseconds that it computed, and halved steps; and
    bytes of experts that passed through the device in captured steps meanwhile."""

    read_bytes: int = 0
    nanoseconds: int = 0
    halved: int = 0
    passed_bytes: int = 0


@dataclass
class _Progress:
    """Steps that were submitted.

    Attributes:
        submitted: rows of the replays that have not begun.
        rows: of the step that runs; None: all.
        failure: what failed on the host. Nothing is computed after it.
    """

    submitted: deque[int] = field(default_factory=deque)
    rows: int | None = None
    failure: Exception | None = None

    def begin(self) -> None:
        self.rows = self.submitted.popleft() if self.submitted else None


class Answering(Protocol):
    """``routed_experts`` of a host whose kernels answer a device by themselves."""

    def asked(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: MoEWeights, out: torch.Tensor,
        expert_bytes: int, ready: int, done: int,
    ) -> Any:  # fmt: skip
        """A place in a step where the device asks for it: see ``HostCall.answers``."""

    def answers(self, asked: Sequence[Any]) -> Callable[[int | None, int, int], tuple[int, int]]:
        """A function that answers all of a step. Its arguments are the rows that are not padding (None: all), threads,
        and what ``HostCall.answers`` says of an address; it returns nanoseconds of products and bytes of experts that
        they read, and raises what failed once all are answered."""


@dataclass(frozen=True, eq=False)
class HostCall:
    """What the device calls in one layer of a captured step.

    Attributes:
        run: does it.
        begins: whether it is a step's first one.
        ask: makes a question of it for ``step``, given the addresses of words; None: ``run`` alone does it.
        step: answers questions of one step, in which experts of so many bytes pass through the device.
        passed: bytes of the layer's experts that pass through the device.
    """

    run: Callable[[], None]
    begins: bool
    ask: Callable[[int, int], Any] | None
    step: Callable[[Sequence[Any], bool, int], Callable[[int], None]]
    passed: int = 0

    def __call__(self) -> None:
        self.run()

    @staticmethod
    def answers(calls: Sequence[tuple[HostCall, int, int]]) -> Callable[[int], None] | None:
        """A function that answers these calls of one step, in this order, as often as the device makes them; None: each
        must be run.

        Args:
            calls: each with two addresses: of a lock of ``pthread_spin_lock``, which the device unlocks to call, and of
                an int32 to which 1 is stored as the answer.

        The function's argument is the address of two int64, which it shares with those who end its thread: it stores
        the address of the lock for which it waits, or 0; and it returns after the lock was unlocked if the second one
        is not 0.
        """
        asked = [call.ask(ready, done) for call, ready, done in calls if call.ask is not None]
        if len(asked) < len(calls) or not asked:
            return None
        return calls[0][0].step(asked, calls[0][0].begins, sum(call.passed for call, _, _ in calls))


@runtime_checkable
class Exchanges(Protocol):
    """A device that copies to the host, calls it and copies back faster than by ``host_call`` between copies."""

    def exchange(
        self, inputs: Sequence[torch.Tensor], to: Sequence[torch.Tensor], work: Callable[[], None],
        found: torch.Tensor, result: torch.Tensor,
    ) -> None:  # fmt: skip
        """Copy each of ``inputs`` (rows [T, n], ids int32 and weights float32 [T, k]) to page-locked memory ``to``, run
        ``work`` as ``Device.host_call`` does, then copy page-locked ``found`` to ``result``: on the current stream.
        Replays of a capture do it again; if ``work`` has ``HostCall.answers``, that may answer all calls of one. The
        caller keeps ``work``, ``to`` and ``found``."""


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
        self._first, self.work, self.steps = first, work, 0
        self._buffers: dict[Any, _Buffers] = {}
        #: The functions that captures call, which know only their addresses.
        self._calls: list[HostCall] = []
        self._progress = _Progress()
        self._stream: Any = None
        #: None: by ``host_call``, between copies.
        self._exchanges = device if isinstance(device, Exchanges) else None

    def replayed(self, rows: int) -> None:
        """As ``Placement.replayed``.

        Raises:
            EvenerError: the host failed in an earlier step.
        """
        self.check()
        self._progress.submitted.append(rows)
        self.steps += 1

    def check(self) -> None:
        """Raise what failed on the host.

        Raises:
            EvenerError: with the kernel that failed, if it was one.
        """
        if (failure := self._progress.failure) is not None:
            self._attribution.raise_attributed(failure)
            raise EngineError(f"computing experts on the host failed: {failure}") from failure

    def start(
        self, path: str, compute: OpFunction, expert_bytes: int,
        x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: MoEWeights, passed: int = 0,
    ) -> Callable[[], torch.Tensor]:  # fmt: skip
        """Submit the layer ``path``; returns what makes the device wait for the result [T, hidden].

        Args:
            compute: ``routed_experts`` on the host.
            expert_bytes: of the weights of one expert.
            passed: bytes of other experts that are copied to the device meanwhile, to be counted.
        """
        device, inputs = self._device, [x, ids, weights]
        to, result = self._buffers_for(inputs), torch.empty_like(x)
        begins = path == self._first
        run = partial(
            self._call, begins, _bound(compute, to, experts), expert_bytes, to.ids.numpy(), experts.copies.numpy(),
            passed,
        )  # fmt: skip
        asked: Any = getattr(compute, "asked", None)
        answers: Any = getattr(compute, "answers", None)
        ask = None if asked is None else partial(asked, *to[:3], experts, to.found, expert_bytes)
        threads = self._threads - (self._threads >= SPARING)
        call = HostCall(run, begins, ask, partial(_Step, answers, self._progress, self.work, threads), passed)
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

    def _call(
        self, begins: bool, compute: Callable[[int], None], expert_bytes: int, ids: np.ndarray[Any, Any],
        copies: np.ndarray[Any, Any], passed: int = 0,
    ) -> None:  # fmt: skip
        """The function that the device calls. ``copies``: of each expert in the host's memory."""
        progress = self._progress
        if begins:
            progress.begin()
        if progress.failure is not None or progress.rows == 0:
            return
        collects = gc.isenabled()
        gc.disable()  # a collection here could free what calls the device, which a function that it calls must not do
        try:
            began, rows = time.perf_counter_ns(), len(ids) if progress.rows is None else progress.rows
            # The thread that waits for the step spins on a core. If the host computed on all of them, the thread that
            # shares its core would hold up the others in every product.
            self._host.limit_threads(self._threads - (self._threads >= SPARING))
            compute(rows)
            self._host.limit_threads(self._threads)
            self.work.nanoseconds += time.perf_counter_ns() - began
            chosen = np.bincount(ids[:rows].ravel(), minlength=len(copies)) > 0
            self.work.read_bytes += expert_bytes * int(np.count_nonzero(chosen & (copies > 0)))
            self.work.passed_bytes += passed
        except Exception as error:  # raised by ``check``: nothing could catch it here
            progress.failure = error
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


def follows_drafter(config: ResolvedConfig) -> bool:
    """Whether a drafter follows each step."""
    return config.config.infer.proposes in installed_catalog().lazy_imports("worker drafter")


def why_eager(config: ResolvedConfig, device: Device, drafted: bool) -> str | None:
    """Why steps with experts on the host cannot be captured, as ``Placement.eager``; None if they can."""
    infer = config.config.infer
    if not device.capabilities.host_calls:
        return f", and {device.name} does not call the host (DeviceCapabilities.host_calls)"
    if infer.tp_size * infer.pp_size > 1:
        return ", and of several ranks one could not end the others' step if it fails there"
    return ", and a drafter follows each step" if drafted else None


class _Step:
    """Answers the calls of a captured step. It does not keep the device, whose end may not wait for a step.

    Args:
        answers: see ``Answering``.
        begins: whether these are a step's first calls.
        passed: bytes of experts that pass through the device in the step.
    """

    def __init__(
        self, answers: Callable[[Sequence[Any]], Callable[[int | None, int, int], tuple[int, int]]],
        progress: _Progress, work: HostWork, threads: int, asked: Sequence[Any], begins: bool,
        passed: int,
    ) -> None:  # fmt: skip
        self._answer, self._progress, self._work = answers(asked), progress, work
        self._threads, self._begins, self._passed = threads, begins, passed

    def __call__(self, waiting: int) -> None:
        progress = self._progress
        if self._begins:
            progress.begin()
        try:
            found = self._answer(progress.rows if progress.failure is None else 0, self._threads, waiting)
        except Exception as error:  # raised by ``check``: nothing could catch it here
            progress.failure = progress.failure or error
            return
        self._work.nanoseconds += found[0]
        self._work.read_bytes += found[1]
        self._work.passed_bytes += self._passed


def _bound(compute: OpFunction, to: _Buffers, experts: MoEWeights) -> Callable[[int], None]:
    """A function that computes the first rows of ``to``, as many as it is told."""
    if getattr(compute, "takes_out", False):
        return lambda count: compute(to.x, to.ids, to.weights, experts, out=to.found, rows=count)

    def rows(count: int) -> None:
        with torch.inference_mode():  # belongs to a thread
            to.found[:count].copy_(compute(to.x[:count], to.ids[:count], to.weights[:count], experts))

    return rows
