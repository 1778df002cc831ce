"""The controller: takes messages, keeps the executor busy, says what happened. It alone ends requests."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict

from evener.engine.deadlines import Deadlines
from evener.engine.executor import Executor
from evener.engine.messages import (
    Abort,
    Dead,
    Finish,
    FromController,
    GetStats,
    NewRequest,
    Shutdown,
    StatsReport,
    ToController,
)
from evener.engine.scheduler import Scheduler
from evener.errors import EngineError


class Controller:
    """One engine: a scheduler and an executor, without a thread of its own.

    Args:
        depth: plans in flight; 1 reads every result before the next plan is made.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, depth: int) -> None:
        self.scheduler, self.executor, self.depth = scheduler, executor, depth
        self.deadlines = Deadlines(time.monotonic)
        self.stopping = False
        self.dead: str | None = None

    @property
    def idle(self) -> bool:
        """Nothing is open and nothing is in flight."""
        return self.scheduler.open == 0 and self.scheduler.in_flight == 0

    def handle(self, messages: Iterable[ToController]) -> list[FromController]:
        """Take messages in, in order."""
        events: list[FromController] = []
        for message in messages:
            events.extend(self._handle(message))
        return events

    def _handle(self, message: ToController) -> list[FromController]:
        match message:
            case NewRequest():
                self.deadlines.set(message.id, message.max_time)
                events = self.scheduler.add(message)
                if self.dead or self.stopping:
                    events += self.scheduler.end(message.id, "error", self.dead or "the engine is shutting down")
                return events
            case Abort():
                return self.scheduler.end(message.id, "abort")
            case Finish():
                return self.scheduler.end(message.id, "stop")
            case GetStats():
                return [self._stats()]
            case Shutdown():
                self.stopping = True
                return [] if message.drain else self.scheduler.end_all("abort")

    def _stats(self) -> StatsReport:
        scheduler, pool = self.scheduler, self.scheduler.state.pool
        return StatsReport(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            blocks=pool.count - pool.slab,
            blocks_used=pool.used,
            **asdict(scheduler.stats),
        )

    def step(self) -> list[FromController]:
        """Fill the executor up to ``depth`` plans, then read the oldest result. Does nothing when there is nothing to
        do.

        A dead worker ends every request with its reason and gives ``Dead`` as the last event.
        """
        if self.dead:
            return []
        events = [event for name in self.deadlines.passed() for event in self.scheduler.end(name, "timeout")]
        try:
            while self.scheduler.in_flight < self.depth:
                plan = self.scheduler.schedule()
                if plan is None:
                    break
                self.executor.submit(plan)
            return events + (self.scheduler.retire(self.executor.read()) if self.scheduler.in_flight else [])
        except EngineError as error:
            return events + self.die(str(error))

    def check(self) -> list[FromController]:
        """While nothing is under way: look whether the worker still lives; as ``step`` if it does not."""
        if self.dead:
            return []
        try:
            self.executor.check()
        except EngineError as error:
            return self.die(str(error))
        return []

    def die(self, reason: str) -> list[FromController]:
        """The engine cannot go on: every open request ends with the reason."""
        self.dead = reason
        return [*self.scheduler.end_all("error", reason), Dead(reason)]
