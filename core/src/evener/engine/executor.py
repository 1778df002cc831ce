"""Executors: how the controller reaches the worker. Plans go in, results come out in the same order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING

from evener.engine.plan import Plan, StepResult

if TYPE_CHECKING:
    from evener.engine.worker import PendingStep, Worker


class Executor(ABC):
    """Runs plans on one worker (or, with ranks, on all of them)."""

    @abstractmethod
    def submit(self, plan: Plan) -> None:
        """Start a step. Returns when it is under way; its result is handed out by ``read``."""

    @abstractmethod
    def read(self) -> StepResult:
        """Block until the oldest submitted step is done and return its result.

        Raises:
            EngineDeadError: the worker is gone.
        """

    def attach(self) -> None:
        """(optional) Called once by the thread that will submit, where that is not the one that made the executor."""
        return

    def check(self) -> None:
        """(optional) Raise ``EngineDeadError`` if the worker is gone. Default: it lives as long as this process."""
        return

    def close(self) -> None:
        """(optional) End the worker. Default: nothing."""
        return


class InlineExecutor(Executor):
    """The worker in this thread: ``submit`` runs (or, on an asynchronous device, enqueues) the step, ``read`` waits for
    its copy."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._pending: deque[PendingStep] = deque()

    def attach(self) -> None:
        self.worker.assembly.device.select()

    def submit(self, plan: Plan) -> None:
        self._pending.append(self.worker.execute(plan))

    def read(self) -> StepResult:
        return self._pending.popleft().wait()
