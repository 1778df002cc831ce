"""The executor of a worker in the controller's own thread."""

from __future__ import annotations

from collections import deque

from evener.engine.wire.executor import Executor
from evener.engine.wire.plan import Plan, StepResult
from evener.engine.worker.worker import PendingStep, Worker


class InlineExecutor(Executor):
    """Runs the worker in the calling thread. ``submit`` runs the step or, on an asynchronous device, enqueues it;
    ``read`` waits until the result is on the host."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._pending: deque[PendingStep] = deque()

    def attach(self) -> None:
        self.worker.assembly.device.select()

    def submit(self, plan: Plan) -> None:
        self._pending.append(self.worker.execute(plan))

    def read(self) -> StepResult:
        return self._pending.popleft().wait()
