"""Measures the time of each step, for limits that learn from it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from evener.engine.batching.step_limit import StepLimit
from evener.engine.wire.executor import Executor
from evener.engine.wire.plan import Order, Plan, StepMasks, StepResult


class TimedLimit(StepLimit):
    """A limit that hears how long each step took."""

    def record(self, plan: Plan, seconds: float) -> None:
        """A step has taken ``seconds``. Steps with media are left out: encoding has a budget of its own. (optional;
        default: nothing is learnt from it)"""

    def wrap(self, executor: Executor) -> Executor:
        return TimedExecutor(executor, self)


@dataclass
class _SubmittedStep:
    plan: Plan
    seconds: float = 0.0


class TimedExecutor(Executor):
    """Runs plans on another executor and tells ``limit`` how long each took.

    The time of a step is the time that the caller is held up by it: while it is submitted, and while its result is
    awaited. Some devices compute inside ``submit``. On the others the result of an earlier plan is awaited meanwhile,
    so that the waiting for this plan begins when the device does. Either way the times add up to those between results,
    less the caller's own work.

    Args:
        inner: runs the plans.
        limit: told of the steps.
        clock: the current time in seconds.
    """

    def __init__(self, inner: Executor, limit: TimedLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self.inner, self._limit, self._clock = inner, limit, clock
        self._submitted: deque[_SubmittedStep] = deque()

    def submit(self, order: Order) -> None:
        if isinstance(order, Plan):
            self._submitted.append(_SubmittedStep(order))
        began = self._clock()
        self.inner.submit(order)
        if isinstance(order, Plan | StepMasks):
            self._submitted[-1].seconds += self._clock() - began

    def read(self) -> StepResult:
        began = self._clock()
        result, step = self.inner.read(), self._submitted[0]
        step.seconds += self._clock() - began
        if not result.proposed:
            self._submitted.popleft()
            if step.plan.media is None:
                self._limit.record(step.plan, step.seconds)
        return result

    def command(self, order: Order) -> list[StepResult]:
        return self.inner.command(order)

    def attach(self) -> None:
        self.inner.attach()

    def check(self) -> None:
        self.inner.check()

    def close(self) -> None:
        self.inner.close()
