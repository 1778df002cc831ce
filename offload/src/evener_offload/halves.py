"""Two halves of a step in turns, so that the host computes experts of one while the device computes the other.

Each half is a whole forward pass of its rows, in a thread of its own; one of the two runs at a time. A half runs until
it needs what the host computes for it. Then the other one goes on: it submits its next layer to the device. The host
computes in a third thread, in the order in which it was asked. So the device gets the same work in the same order in
every run, and ranks meet in the same collectives. As in two-batch overlap of vLLM and SGLang, whose other resource is
the network between ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class _Stopped(BaseException):
    """Ends a half whose other half has failed; nothing catches it on the way."""


class Halves:
    """Runs two functions in turns.

    Args:
        select: prepares a thread for compute on the device and on the host.
    """

    def __init__(self, select: Callable[[], None]) -> None:
        self._second = ThreadPoolExecutor(1, "evener-second-half", initializer=select)
        self._host = ThreadPoolExecutor(1, "evener-host-experts", initializer=select)
        self._gates: Sequence[threading.Semaphore] = ()
        self._alive: set[int] = set()
        self._running, self._failed = 0, False

    @property
    def active(self) -> bool:
        """Whether two functions are running."""
        return bool(self._alive)

    def close(self) -> None:
        """End the threads; ``run`` cannot be called any more. Calling it again does nothing."""
        self._second.shutdown()
        self._host.shutdown()

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
        """Run both, and return both results. ``first`` runs in the calling thread, and begins.

        Raises:
            Whatever one of them raises, once the other has ended, too.
        """
        self._gates = threading.Semaphore(0), threading.Semaphore(0)
        self._alive, self._running, self._failed = {0, 1}, 0, False
        other = self._second.submit(self._run_second, second)
        try:
            found = self._turn(0, first)
        except _Stopped:  # the other one has failed
            other.result()
            raise AssertionError("a half stops only if the other one has failed") from None
        except BaseException:
            other.exception()
            raise
        return found, other.result()

    def compute(self, work: Callable[[], T]) -> Callable[[], T]:
        """Start ``work`` in the host's thread; returns what waits for its result. Meanwhile the other half goes on."""
        job: Future[T] = self._host.submit(_inferred, work)

        def wait() -> T:
            self._switch()
            return job.result()

        return wait

    def _run_second(self, second: Callable[[], T]) -> T:
        self._gates[1].acquire()
        if self._failed:
            self._alive.discard(1)
            raise _Stopped
        return self._turn(1, lambda: _inferred(second))

    def _turn(self, me: int, work: Callable[[], T]) -> T:
        """Run a half to its end; then the other one goes on."""
        try:
            return work()
        except BaseException:
            self._failed = True
            raise
        finally:
            self._alive.discard(me)
            self._resume(1 - me)

    def _switch(self) -> None:
        """Let the other half go on until it waits, or ends."""
        me = self._running
        if 1 - me in self._alive:
            self._resume(1 - me)
            self._gates[me].acquire()
        if self._failed:
            raise _Stopped

    def _resume(self, other: int) -> None:
        self._running = other
        if other in self._alive:
            self._gates[other].release()


def _inferred(work: Callable[[], T]) -> T:
    with torch.inference_mode():  # belongs to a thread
        return work()
