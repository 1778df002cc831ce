"""The interface through which the controller uses its workers. Plans go in, results come out in the same order."""

from __future__ import annotations

from abc import ABC, abstractmethod

from evener.engine.wire.plan import Order, StepResult


class Executor(ABC):
    """Runs plans on the worker, or on the workers of all ranks."""

    @abstractmethod
    def submit(self, order: Order) -> None:
        """Start a step without waiting for it; ``read`` returns its result. A ``StepMasks`` lets the last step
        sample."""

    @abstractmethod
    def read(self) -> StepResult:
        """Block until the oldest submitted step is done and return its result, or only its drafts while the step waits
        for masks (``StepResult.proposed``).

        Raises:
            EngineDeadError: a worker has died.
        """

    def command(self, order: Order) -> list[StepResult]:
        """Have every worker do a ``Command`` while no step is in flight, however long it takes. Returns their answers.
        (optional; default: there is one worker, whose answer is read as if it were a step's)

        Raises:
            EngineDeadError: a worker has died.
        """
        self.submit(order)
        return [self.read()]

    def attach(self) -> None:
        """(optional) Called once by the thread that will call ``submit``, which may differ from the one that made the
        executor."""
        return

    def check(self) -> None:
        """(optional) Raise ``EngineDeadError`` if a worker has died. Default: it lives as long as this process."""
        return

    def close(self) -> None:
        """(optional) Stop the workers. Default: does nothing."""
        return
