"""Runs two halves of a step in turns: the host computes experts of one half while the device computes the other half.

Each half is a whole forward pass of its rows, in a thread of its own; only one of the two threads runs at a time. A
half runs until it needs a result of the host. Then the other half goes on, and submits its next layer to the device.
The host computes in a third thread, in the order of the requests. So every run submits the same work in the same order,
and all ranks reach the same collectives. Two-batch overlap of vLLM and SGLang does the same to hide the network between
ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class _Stopped(BaseException):
    """Ends a half after the other half has failed. No ``except Exception`` on the way catches it."""


class Halves:
    """Runs two functions in turns.

    Args:
        select: is called in each new thread: prepares it for compute on the device and on the host.
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
        """End the threads. After that ``run`` cannot be called. Calling ``close`` again does nothing."""
        self._second.shutdown()
        self._host.shutdown()

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
        """Run both functions, and return both results. ``first`` runs in the calling thread, and begins.

        Raises:
            Whatever one function raises, after both have ended.
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
        """Start ``work`` in the host's thread. Returns a function that lets the other half go on, and then waits for
        the result."""
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
        """Run a half to its end; then the other half goes on."""
        try:
            return work()
        except BaseException:
            self._failed = True
            raise
        finally:
            self._alive.discard(me)
            self._resume(1 - me)

    def _switch(self) -> None:
        """Let the other half go on until it waits or ends."""
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
    with torch.inference_mode():  # each thread has its own mode
        return work()
