"""Experts of a streamed step that the host computes, while other experts are copied to the device.

For an expert with few rows, the host's product takes about as long as the copy. So the host and the link together end
sooner than either alone. The host gets the experts with the fewest rows (as in HybriMoE, Zhong et al. 2025). It
computes in a thread of its own, because the thread that submits work to the device is busy. If the host's kernels have
such a thread, that one is used: a thread of Python would wait for the interpreter's lock, which the submitting thread
holds. The device adds the host's sums to its own. If the device can, it waits by itself for a word in page-locked
memory that says that the host's sums are ready.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import torch

from evener.contracts.device import Device
from evener.contracts.ops import OpFunction
from evener.contracts.weights import MoEWeights
from evener_offload.captured_experts import SPARING, HostWork
from evener_offload.expert_costs import ExpertCosts, Indices, host_share

log = logging.getLogger("evener.worker")
#: The host is timed with 1 row and with so many rows of each expert, so many times each.
_TIMED_ROWS, _TIMES = (16, 96), 2
#: Bytes of page-locked memory for the word, so that nothing else is in its cache line.
_LINE = 64
#: So many steps of a size are timed with the host's part, and so many without it, each after one that sets things up.
#: After ``_AGAIN`` steps of the size they are timed again: texts change, and so does other work on the machine.
_TRIALS, _AGAIN = 3, 256


class Begins(Protocol):
    """``routed_experts`` of a host whose kernels have a thread of their own."""

    def begin(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: MoEWeights, out: torch.Tensor,
        threads: int, word: torch.Tensor | None = None,
    ) -> Callable[[], int]:  # fmt: skip
        """Begin to compute into ``out``, [T, hidden], with ``threads`` threads; the caller is none of them.

        Returns a function that waits for the end, and returns the nanoseconds that the computation took, or raises what
        it raised. Until then the inputs must not change. At the end, also after a failure, 1 is stored in ``word``,
        int32 [1]. A device may have only one such call at a time."""


@runtime_checkable
class ReadsHost(Protocol):
    """A device that reads page-locked host memory directly. Copies of the sums would wait for copies of experts."""

    def mapped(self, host: torch.Tensor) -> torch.Tensor:
        """The contiguous page-locked tensor ``host`` as a tensor of the device, without a copy."""

    def await_word(self, word: torch.Tensor) -> None:
        """Let work that is submitted to the current stream from now on wait until ``word``, int32 [1] in page-locked
        memory, is more than 0."""


@dataclass
class _Trials:
    """Steps of one size.

    Attributes:
        with_host, without: seconds for each byte of chosen experts, with the host's part and without it.
        steps: how many steps there were.
    """

    with_host: list[float] = field(default_factory=list)
    without: list[float] = field(default_factory=list)
    steps: int = 0


class PromptShare:
    """The host's part of streamed steps.

    Args:
        host: the device that computes experts on the host, with so many ``threads``.
        select: is called in the new thread: prepares it for compute.
        work: gets the counts of what the host computes.

    Attributes:
        computed: how many experts the host computed beside copies.
        active: whether the host takes part in this step.
    """

    def __init__(self, device: Device, host: Device, threads: int, select: Callable[[], None], work: HostWork) -> None:
        self._device, self._host, self._work, self.computed = device, host, work, 0
        self._threads = threads
        self._thread = ThreadPoolExecutor(1, "evener-prompt-share", initializer=select)
        #: Bytes of an expert, and its costs; None: not measured yet.
        self._costs: tuple[int, ExpertCosts] | None = None
        self._room: torch.Tensor | None = None
        #: None: the device does not read page-locked memory. ``_there``: ``_room`` as a tensor of the device.
        self._reads = device if isinstance(device, ReadsHost) else None
        self._there: torch.Tensor | None = None
        self._word: torch.Tensor | None = None
        #: Waits for the part that has begun, and keeps its inputs alive; None: no part has begun.
        self._begun: Callable[[], None] | None = None
        self._trials: dict[int, _Trials] = {}
        self._size, self._began, self.active = 0, 0.0, True
        #: Bytes of experts that the step has chosen so far.
        self._chosen = 0
        #: By path: a layer's weights, and the same with a map of only the host's experts.
        self._own: dict[str, tuple[MoEWeights, MoEWeights]] = {}

    def close(self) -> None:
        """End the thread. Calling ``close`` again does nothing."""
        try:
            self._settle()
        except Exception:  # of a step that was given up, so nobody waits for it
            log.exception("the host's part of a prompt failed")
        self._thread.shutdown()

    def measure(
        self, nbytes: int, copies: Callable[[float], float], compute: OpFunction, x: torch.Tensor, experts: int,
        top: int, w: MoEWeights,
    ) -> tuple[ExpertCosts, ExpertCosts]:  # fmt: skip
        """Time the host with all experts of a layer, which are too large for caches. Returns two costs: of the host
        alone, and beside copies of experts to the device, because both read host memory.

        Args:
            nbytes: bytes of an expert.
            copies: waits for the copies that it has started before, starts copies that take so many seconds, and
                returns the seconds of the copy of one expert.
            x: rows [T, hidden], on the host.
            experts, top: experts of the layer, and how many a token chooses.
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

    @property
    def measured(self) -> bool:
        """Whether costs have been measured."""
        return self._costs is not None

    def begin(self, tokens: int) -> None:
        """A step of so many tokens begins, or reaches its first streamed layer: decide whether the host takes part.

        The first steps of each size (a power of two of tokens) are timed with the host's part and without it, in turns.
        The fewest seconds for each byte of chosen experts decide, because other work on the machine only makes steps
        slower. The first step of each way does not count: it sets things up, and all tokens of a warm-up are equal and
        choose few experts.
        """
        self._size, self._began, self._chosen = tokens.bit_length(), time.perf_counter(), 0
        trials = self._trials.get(self._size)
        if trials is None or trials.steps == _AGAIN:
            trials = self._trials[self._size] = _Trials()
        trials.steps += 1
        if len(trials.without) <= _TRIALS:
            self.active = len(trials.with_host) <= len(trials.without)
        else:
            self.active = min(trials.with_host[1:]) <= min(trials.without[1:])

    def end(self) -> None:
        """The step's last streamed layer has been submitted. Waits for the host's part. In a step that is timed, also
        waits for the device: in steps without the host's part, more copies are still under way now.

        Raises:
            Exception: the host failed.
        """
        self._settle()
        trials = self._trials[self._size]
        times = trials.with_host if self.active else trials.without
        if len(times) <= _TRIALS:
            self._device.synchronize()
            times.append((time.perf_counter() - self._began) / max(1, self._chosen))

    def note_chosen(self, nbytes: int) -> None:
        """The step's tokens have chosen experts of ``nbytes`` bytes in all in a streamed layer."""
        self._chosen += nbytes

    def choose(self, nbytes: int, missing: Indices, rows: Indices, under_way: float = 0.0) -> Indices:
        """The experts that the host computes, those with the fewest rows first.

        Args:
            nbytes: bytes of an expert.
            missing, rows: experts that must be copied or computed on the host, and the rows of each.
            under_way: seconds until the copies end that were submitted before.
        """
        return host_share(missing, rows, self._costs_of(nbytes), under_way)

    def copying(self, nbytes: int) -> float:
        """Seconds of the copy of an expert of so many bytes."""
        return self._costs_of(nbytes).copy

    def _costs_of(self, nbytes: int) -> ExpertCosts:
        assert self._costs is not None, "measured before the first step"
        like, costs = self._costs
        return costs if nbytes == like else costs.times(nbytes / like)

    def start(
        self, path: str, chosen: Indices, nbytes: int, compute: OpFunction, x: torch.Tensor, ids: torch.Tensor,
        weights: torch.Tensor, w: MoEWeights,
    ) -> Callable[[torch.Tensor], torch.Tensor]:  # fmt: skip
        """Start computing the chosen experts' part of each token's sum. Returns a function that waits for the sums, and
        adds them to rows [T, hidden] of the device.

        Args:
            nbytes: bytes of an expert.
            x, ids, weights: inputs of ``routed_experts``, on the host.

        Raises:
            Exception: the host failed in an earlier part.
        """
        self._settle()
        self.computed += len(chosen)
        own, out = self._mapped(path, chosen, w), self._locked(x)
        if getattr(compute, "begin", None) is not None:
            return self._begin(nbytes * len(chosen), cast(Begins, compute), x, ids, weights, own, out)

        def job() -> torch.Tensor:
            began = time.perf_counter_ns()
            with torch.inference_mode():  # each thread has its own mode
                if getattr(compute, "takes_out", False):
                    found = self._alone(partial(compute, out=out, rows=len(x)), x, ids, weights, own)
                else:
                    found = out.copy_(self._alone(compute, x, ids, weights, own))
            self._work.nanoseconds += time.perf_counter_ns() - began
            self._work.read_bytes += nbytes * len(chosen)
            return found

        started = self._thread.submit(job)

        def add(rows: torch.Tensor) -> torch.Tensor:
            found = started.result()
            # The next layer's rows come to the host after this copy, so no one writes this memory before.
            return rows.add_(torch.empty_like(rows).copy_(found, non_blocking=True))

        return add

    def _begin(
        self, nbytes: int, compute: Begins, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, own: MoEWeights,
        out: torch.Tensor,
    ) -> Callable[[torch.Tensor], torch.Tensor]:  # fmt: skip
        """As ``start``, in the host kernels' own thread. ``nbytes``: bytes of all chosen experts."""
        word, there = self._word, self._there
        if word is not None:
            word.zero_()  # the device waits for it no more: this layer's rows came after that wait
        inputs, threads = (x, ids, weights), self._threads - (self._threads >= SPARING)
        end = compute.begin(*inputs, own, out, threads, word)

        def settle() -> None:
            _ = inputs  # keeps their memory until now
            self._begun = None
            self._work.nanoseconds += end()
            self._work.read_bytes += nbytes

        self._begun = settle

        def add(rows: torch.Tensor) -> torch.Tensor:
            if self._reads is None or word is None or there is None:
                self._settle()
                return rows.add_(torch.empty_like(rows).copy_(out, non_blocking=True))
            # The submitting thread goes on with the next layer.
            self._reads.await_word(word)
            return rows.add_(there[: out.nbytes].view(out.dtype).view(out.shape))

        return add

    def _settle(self) -> None:
        """Wait for the part that has begun, if any, and raise what it raised."""
        if self._begun is not None:
            self._begun()

    def _locked(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for the result, page-locked if the device has any. From other memory, torch would copy the result to
        page-locked memory with threads that spin for a while, on cores that the next layer needs."""
        if self._room is None or self._room.nbytes < like.nbytes:
            room, word = (next(iter(self._device.pinned_buffers(1, n)), None) for n in (like.nbytes, _LINE))
            self._room, self._word, self._there = torch.empty(like.nbytes, dtype=torch.uint8), None, None
            if room is not None and word is not None:
                self._room, self._word = room, word[:4].view(torch.int32)
                self._there = None if self._reads is None else self._reads.mapped(room)
        return self._room[: like.nbytes].view(like.dtype).view(like.shape)

    def _alone(self, compute: OpFunction, *inputs: Any) -> torch.Tensor:
        """Compute on the host with one thread less, because another thread submits work meanwhile."""
        self._host.limit_threads(self._threads - (self._threads >= SPARING))
        try:
            found: torch.Tensor = compute(*inputs)
        finally:
            self._host.limit_threads(self._threads)
        return found

    def _mapped(self, path: str, chosen: Indices, w: MoEWeights) -> MoEWeights:
        """The weights of the layer, with a map of only the chosen experts: all others have slot -1. The tensors are the
        same each time, because kernels keep their addresses."""
        known = self._own.get(path)
        if known is None or known[0] is not w:
            known = self._own[path] = w, w._replace(slots=w.slots.clone(), copies=w.copies.clone())
        slots, copies = known[1].slots.numpy(), known[1].copies.numpy()
        slots[:], copies[:] = -1, 0
        slots[chosen], copies[chosen] = w.slots.numpy()[chosen], 1
        return known[1]
