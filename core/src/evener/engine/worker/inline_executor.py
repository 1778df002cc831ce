"""The executor of a worker in the controller's own thread."""

from __future__ import annotations

from collections import deque

from evener.engine.sampling.pending import PendingStep
from evener.engine.wire.executor import Executor
from evener.engine.wire.plan import Order, StepResult
from evener.engine.worker.worker import Worker


class InlineExecutor(Executor):
    """Runs the worker in the calling thread. ``submit`` runs the step or, on an asynchronous device, enqueues it;
    ``read`` waits until the result is on the host."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._pending: deque[PendingStep] = deque()

    def attach(self) -> None:
        self.worker.assembly.device.select()

    def submit(self, order: Order) -> None:
        if (step := self.worker.execute(order)) is not None:
            self._pending.append(step)

    def read(self) -> StepResult:
        return self._pending.popleft().wait()

    def close(self) -> None:
        self.worker.close()
