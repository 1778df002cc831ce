"""Experts that the host computes in captured steps, as in KTransformers.

For each layer the device copies the rows, expert ids and weights to page-locked memory, calls the host, and copies the
result back. All this is on a stream of its own; meanwhile the device computes the layer's shared experts. To replay a
step is one call. The device waits for the host; the host does not wait for the device.

If the host's kernels can answer the device by themselves, one call of these kernels answers a whole step. A thread of
Python would wait for the interpreter's lock in each layer, while the thread that prepares the next step holds it.
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
#: With at least so many threads, the host computes with one less while another thread of the process is busy.
SPARING = 4


@dataclass
class HostWork:
    """Counts of what the host has computed.

    Attributes:
        read_bytes: of the experts that the host read.
        nanoseconds: in which the host computed.
        halved: steps in two halves.
        passed_bytes: of the experts that passed through the device in captured steps.
    """

    read_bytes: int = 0
    nanoseconds: int = 0
    halved: int = 0
    passed_bytes: int = 0


@dataclass
class _Progress:
    """Captured steps that were submitted.

    Attributes:
        submitted: for each replay that has not begun, its rows without padding.
        rows: the rows without padding of the running step; None: all of its rows.
        failure: what failed on the host. After a failure nothing is computed.
    """

    submitted: deque[int] = field(default_factory=deque)
    rows: int | None = None
    failure: Exception | None = None

    def begin(self) -> None:
        self.rows = self.submitted.popleft() if self.submitted else None


class Answering(Protocol):
    """``routed_experts`` of a host whose kernels answer a device without Python."""

    def asked(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: MoEWeights, out: torch.Tensor,
        expert_bytes: int, ready: int, done: int,
    ) -> Any:  # fmt: skip
        """A description of one call of the device, for ``answers``. ``ready`` and ``done``: the two addresses of
        ``HostCall.answers``."""

    def answers(self, asked: Sequence[Any]) -> Callable[[int | None, int, int], tuple[int, int]]:
        """A function that answers all calls of a step.

        Its arguments: the rows without padding (None: all), the number of threads, and the address that
        ``HostCall.answers`` describes. It returns the nanoseconds of the products, and the bytes of experts that the
        products read. After all answers it raises what failed."""


@dataclass(frozen=True, eq=False)
class HostCall:
    """The call that the device makes in one layer of a captured step.

    Attributes:
        run: computes the layer's experts on the host.
        begins: whether this is a step's first call.
        ask: describes the call for ``step``, given two addresses, see ``answers``; None: only ``run`` can compute it.
        step: makes the function that answers all calls of one step, from their descriptions, ``begins``, and the bytes
            of experts that pass through the device in the step.
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
        """A function that answers these calls of one step, in this order, each time that the device makes them; None:
        each call must be run by itself.

        Args:
            calls: each with two addresses. The first is that of a ``pthread_spin_lock``, which the device unlocks to
                call. The second is that of an int32: 1 is stored there as the answer.

        The function's argument is the address of two int64, with which another thread can end it. The function stores
        in the first one the address of the lock for which it waits, or 0. If the second one is not 0, it returns once
        this lock is unlocked.
        """
        asked = [call.ask(ready, done) for call, ready, done in calls if call.ask is not None]
        if len(asked) < len(calls) or not asked:
            return None
        return calls[0][0].step(asked, calls[0][0].begins, sum(call.passed for call, _, _ in calls))


@runtime_checkable
class Exchanges(Protocol):
    """A device with a faster way to copy to the host, call it and copy back than ``host_call`` between copies."""

    def exchange(
        self, inputs: Sequence[torch.Tensor], to: Sequence[torch.Tensor], work: Callable[[], None],
        found: torch.Tensor, result: torch.Tensor,
    ) -> None:  # fmt: skip
        """On the current stream: copy each of ``inputs`` (rows [T, n]; ids, int32, and weights, float32, [T, k]) to
        page-locked memory ``to``, run ``work`` as ``Device.host_call`` does, then copy page-locked ``found`` to
        ``result``. Each replay of a capture does this again. If ``work`` has ``HostCall.answers``, that function may
        answer all calls of a replay. The caller keeps ``work``, ``to`` and ``found`` alive."""


class _Buffers(NamedTuple):
    """Page-locked memory for the rows of a layer. All layers use the same memory, because they run one after another.

    Attributes:
        x, ids, weights: inputs of ``routed_experts``.
        found: its result.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    found: torch.Tensor


class CapturedExperts:
    """Submits the host's work of layers in captured steps. The host does not compute padding rows.

    Args:
        host: the device that computes the experts.
        threads: threads that ``host`` may use.
        attribution: names the kernel that failed.
        first: path of the layer that a step reaches first.
        work: gets the counts of what the host computes.

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
        #: Keeps the functions alive that captures call: captures hold only their addresses.
        self._calls: list[HostCall] = []
        self._progress = _Progress()
        self._stream: Any = None
        #: None: the device has only ``host_call``, between copies.
        self._exchanges = device if isinstance(device, Exchanges) else None

    def replayed(self, rows: int) -> None:
        """See ``Placement.replayed``.

        Raises:
            EvenerError: the host failed in an earlier step.
        """
        self.check()
        self._progress.submitted.append(rows)
        self.steps += 1

    def check(self) -> None:
        """Raise what failed on the host, if anything.

        Raises:
            EvenerError: the failure, with the name of the kernel if a kernel failed.
        """
        if (failure := self._progress.failure) is not None:
            self._attribution.raise_attributed(failure)
            raise EngineError(f"computing experts on the host failed: {failure}") from failure

    def start(
        self, path: str, compute: OpFunction, expert_bytes: int,
        x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: MoEWeights, passed: int = 0,
    ) -> Callable[[], torch.Tensor]:  # fmt: skip
        """Submit the layer ``path``. Returns a function that lets the current stream wait for the result, and returns
        it: [T, hidden].

        Args:
            compute: ``routed_experts`` on the host.
            expert_bytes: bytes of the weights of one expert.
            passed: bytes of other experts that are copied to the device meanwhile, for the counts.
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
        """What the device calls. ``copies``: int32 [experts], above 0 for the experts that the host computes."""
        progress = self._progress
        if begins:
            progress.begin()
        if progress.failure is not None or progress.rows == 0:
            return
        collects = gc.isenabled()
        gc.disable()  # a collection could call the device to free objects; such calls are forbidden here
        try:
            began, rows = time.perf_counter_ns(), len(ids) if progress.rows is None else progress.rows
            # The thread that waits for the step spins on a core. If the host computed on all cores, the thread on that
            # core would be late, and all others would wait for it in every product.
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
        """A stream beside the one that computes; None if the device has only one queue."""
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
    """Why steps with experts on the host cannot be captured, in the form of ``Placement.eager``; None if they can."""
    infer = config.config.infer
    if not device.capabilities.host_calls:
        return f", and {device.name} does not call the host (DeviceCapabilities.host_calls)"
    if infer.tp_size * infer.pp_size > 1:
        return ", and of several ranks one could not end the others' step if it fails there"
    return ", and a drafter follows each step" if drafted else None


class _Step:
    """Answers the calls of a captured step. It holds no reference to the device: the device can be freed while a
    step still has this object.

    Args:
        answers: see ``Answering``.
        begins: whether the first call is a step's first one.
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
    """A function that computes the first ``count`` rows of ``to``; ``count`` is its argument."""
    if getattr(compute, "takes_out", False):
        return lambda count: compute(to.x, to.ids, to.weights, experts, out=to.found, rows=count)

    def rows(count: int) -> None:
        with torch.inference_mode():  # each thread has its own mode
            to.found[:count].copy_(compute(to.x[:count], to.ids[:count], to.weights[:count], experts))

    return rows
