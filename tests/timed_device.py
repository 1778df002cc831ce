"""An executor that computes nothing and takes time by a simulated clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from evener.engine.wire.executor import Executor
from evener.engine.wire.plan import Plan, StepResult


class SimulatedDevice(Executor):
    """Takes time by its own clock: ``seconds`` gives that of a plan. It computes inside ``submit``, as a CPU in the
    controller's process does, or in the background, as an accelerator or another process does."""

    def __init__(self, seconds: Callable[[Plan], float], background: bool = True) -> None:
        self.now = 0.0
        self.seconds, self.background = seconds, background
        self.steps: list[Plan] = []
        self._done: deque[tuple[float, StepResult]] = deque()
        self._free = 0.0

    def clock(self) -> float:
        return self.now

    def submit(self, plan: Any) -> None:
        self.steps.append(plan)
        self._free = max(self._free, self.now) + self.seconds(plan)
        if not self.background:
            self.now = self._free
        self._done.append((self._free, StepResult(plan=plan.id, ids=[5] * len(plan.samples))))

    def read(self) -> StepResult:
        end, result = self._done.popleft()
        self.now = max(self.now, end)
        return result
